"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def emit_json(value: Any) -> None:
    """One JSON document on one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def emit_text(text: str) -> None:
    """Text for people on standard output, never read as markup."""
    Console(file=sys.stdout, highlight=False).print(Text(text), soft_wrap=True)


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table on standard output."""
    cells = [[str(cell) for cell in row] for row in rows]
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        # Into a pipe a row is a line, whatever its length.
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in [list(columns), *cells]:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            sys.stdout.write(line.rstrip() + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def note(text: str) -> None:
    """A remark for the person at the terminal."""
    Console(stderr=True, highlight=False).print(Text(text), soft_wrap=True)
