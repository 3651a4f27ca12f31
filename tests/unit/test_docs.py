"""What the documents say there is, there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMED = re.compile(r"`((?:unit|integration|kernels)/test_\w+\.py)(?:::(\w+))?`")
LINK = re.compile(r"\]\(([^)#:]+)\)")


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_and_linked_files_exist(document: Path) -> None:
    text = document.read_text()
    for file, function in NAMED.findall(text):
        assert (ROOT / "tests" / file).is_file(), f"{document.name} names {file}"
        if function:
            assert function in functions(ROOT / "tests" / file), f"{document.name}: {function}"
    for link in LINK.findall(text):
        assert (document.parent / link).exists(), f"{document.name} links {link}"


def test_every_format_and_option_has_a_named_test() -> None:
    table = (ROOT / "docs" / "checkpoints.md").read_text().split("## Formats")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 20
    for row in rows:
        assert NAMED.search(row[2]), row[:2]
