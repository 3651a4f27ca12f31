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
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    # Into a pipe nothing is folded: a line is a row.
    console.print(table, soft_wrap=not console.is_terminal)


def note(text: str) -> None:
    """A remark for the person at the terminal."""
    Console(stderr=True, highlight=False).print(Text(text), soft_wrap=True)
