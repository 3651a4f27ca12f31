"""From a source of prompts to checked rows, one at a time: constant memory whatever the size."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from batchtp.core import Endpoint, Failure
from batchtp.errors import InputError, RequestError
from batchtp.queue.openai import custom_id_of, parse_document, parse_line
from batchtp.store.intake import IncomingRequest
from batchtp.store.leases import storable

Source: TypeAlias = str | Path | Iterable[str | Mapping[str, Any]]

_BOM = b"\xef\xbb\xbf"


class LineChecker:
    """Turns raw lines into rows. Remembers 16 bytes of every custom_id to find duplicates."""

    def __init__(self, model: str, *, text: bool, max_line_bytes: int) -> None:
        self._model = model
        self._text = text
        self._max_line_bytes = max_line_bytes
        self._lines_by_id: dict[bytes, int] = {}

    def rows(self, source: Source) -> Iterator[IncomingRequest]:
        """A row for every line that is not blank; a bad line's row says what is wrong with it.

        Raises InputError when a file cannot be read.
        """
        for index, (line, raw) in enumerate(read_lines(source, self._max_line_bytes)):
            try:
                yield self._good(index, line, raw)
            except RequestError as error:
                yield self._bad(index, line, raw, error)

    def _good(self, index: int, line: int, raw: bytes | Mapping[str, Any]) -> IncomingRequest:
        if isinstance(raw, bytes):
            if len(raw) > self._max_line_bytes:
                raise RequestError(
                    "line_too_long",
                    f"The line is longer than {self._max_line_bytes} bytes (max_line_bytes).",
                )
            parsed = parse_line(raw, line, model=self._model, text=self._text)
        else:
            parsed = parse_document(dict(raw), line, model=self._model)
        name = hashlib.blake2b(parsed.custom_id.encode(), digest_size=16).digest()
        first = self._lines_by_id.setdefault(name, line)
        if first != line:
            raise RequestError(
                "duplicate_custom_id",
                f"custom_id {parsed.custom_id!r} is on line {first} already.",
                "custom_id",
            )
        try:
            payload = json.dumps(parsed.payload, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("invalid_request", f"The request is not JSON: {error}.") from None
        return IncomingRequest(index, line, parsed.custom_id, parsed.request.endpoint, payload)

    def _bad(
        self, index: int, line: int, raw: bytes | Mapping[str, Any], error: RequestError
    ) -> IncomingRequest:
        custom_id = f"request-{line}" if self._text else custom_id_of(raw, line)
        return IncomingRequest(
            index,
            line,
            storable(custom_id)[0][:512],
            Endpoint.CHAT,
            failure=Failure(error.code, storable(error.message)[0], error.param, line),
        )


def read_lines(
    source: Source, max_line_bytes: int
) -> Iterator[tuple[int, bytes | Mapping[str, Any]]]:
    """(one-based line number, line) for each line that is not blank.

    A line over the limit is cut just past it, so that it can be told and costs no memory.
    """
    if isinstance(source, str | Path):
        with _opened(source) as stream:
            yield from _stream_lines(stream, max_line_bytes)
        return
    for line, item in enumerate(source, 1):
        if isinstance(item, str):
            yield line, {"prompt": item}
        elif isinstance(item, Mapping):
            yield line, item
        else:
            raise InputError(
                f"Item {line} is a {type(item).__name__}; requests are dicts or prompts (str)."
            )


def _stream_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    line = 0
    while raw := stream.readline(max_line_bytes + 2):
        line += 1
        while not raw.endswith(b"\n") and len(raw) > max_line_bytes:
            rest = stream.readline(1 << 20)
            if not rest or rest.endswith(b"\n"):
                break
        if line == 1:
            raw = raw.removeprefix(_BOM)
        raw = raw.rstrip(b"\r\n")
        if raw.strip():
            yield line, raw


@contextmanager
def _opened(source: str | Path) -> Iterator[BinaryIO]:
    try:
        if str(source) == "-":
            yield sys.stdin.buffer
        elif str(source).endswith(".gz"):
            with gzip.open(source, "rb") as unpacked:
                yield io.BufferedReader(unpacked)
        else:
            with open(source, "rb") as stream:
                yield stream
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"Cannot read {source}: {reason}.", code="unreadable_file") from error
    except EOFError as error:
        raise InputError(f"Cannot read {source}: it is cut off.", code="unreadable_file") from error
