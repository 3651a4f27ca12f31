"""Logging: text for people or JSON for machines, on standard error, credentials masked."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_URL_CREDENTIALS = re.compile(r"(?<=://)([^:/@\s]*):([^@/\s]+)@")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# What they say at `info` is about themselves; their warnings stay.
_CHATTY = ("celery", "kombu", "amqp", "alembic", "sqlalchemy", "httpx", "urllib3", "filelock")


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send every logger's records to `stream` (standard error), once, in this format.

    Replaces what was configured before. `level` is a name such as info, `log_format` text or json.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    if level != "debug":
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)


def mask(text: str) -> str:
    """`text` with the password of every URL in it replaced by ***."""
    return _URL_CREDENTIALS.sub(r"\1:***@", text)


class TextFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z info logger: message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, its traceback below it."""
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        name = record.name.removeprefix("batchtp.")
        line = f"{_stamp(record)} {record.levelname.lower()} {name}: {record.getMessage()}{extras}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return mask(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at, level, logger, message, the record's own fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One record on one line."""
        fields = {
            "at": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return mask(json.dumps(fields, ensure_ascii=False, default=str))


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


def _stamp(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
