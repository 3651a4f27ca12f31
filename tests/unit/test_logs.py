"""Logging: one line a record, credentials masked."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from batchtp import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_keep_fields_and_mask_passwords(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream)
    try:
        raise RuntimeError("no answer from redis://u:hunter2@host/0")
    except RuntimeError:
        logging.getLogger("batchtp.x").exception("connecting %s", "to\nit", extra={"rank": 3})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert "hunter2" not in line
    record = json.loads(line)
    assert (record["level"], record["logger"], record["rank"]) == ("error", "batchtp.x", 3)
    assert record["message"] == "connecting to\nit"
    assert "redis://u:***@host/0" in record["traceback"]


def test_text_lines_and_levels(stream: io.StringIO) -> None:
    logs.configure("warning", "text", stream)
    logging.getLogger("batchtp.x").info("no")
    logging.getLogger("batchtp.x").warning("yes %d", 1, extra={"batch": "b1"})
    assert stream.getvalue().endswith(" warning x: yes 1 batch=b1\n")
