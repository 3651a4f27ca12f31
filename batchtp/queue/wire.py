"""The messages of a submission: chunks of requests, compressed, and the seal.

A message is an untrusted hint: `unpack` checks sizes and shapes again. Only JSON crosses the wire.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from batchtp.core import Endpoint, Failure
from batchtp.errors import RequestError
from batchtp.store.intake import BatchHead, IncomingRequest
from batchtp.store.leases import storable

# A chunk is about 1 MB of JSON; one line may be longer, and none is longer than this.
_MOST_BYTES = 64 << 20


def pack(rows: Sequence[IncomingRequest]) -> tuple[str, str]:
    """A chunk as (text for a message, digest of its content)."""
    content = json.dumps([_plain(row) for row in rows], separators=(",", ":")).encode("ascii")
    digest = hashlib.sha256(content).hexdigest()
    return base64.b64encode(zlib.compress(content, 3)).decode("ascii"), digest


def unpack(packed: str) -> tuple[list[IncomingRequest], str]:
    """The rows of a chunk and its digest. Raises RequestError when the message is malformed."""
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        if inflater.unconsumed_tail:
            raise RequestError("invalid_message", "The chunk is too large.")
        rows = [_row(row) for row in json.loads(content)]
    except (
        zlib.error,
        binascii.Error,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        raise RequestError("invalid_message", f"The chunk is malformed: {error}") from error
    return rows, hashlib.sha256(content).hexdigest()


def head_document(head: BatchHead) -> dict[str, Any]:
    """What every message of a batch carries."""
    return {
        "batch_id": head.batch_id,
        "model": head.model,
        "priority": head.priority,
        "metadata": dict(head.metadata),
    }


def read_head(document: Mapping[str, Any]) -> BatchHead:
    """The reverse. Raises RequestError."""
    match document:
        case {
            "batch_id": str(batch_id),
            "model": str(model),
            "priority": int(priority),
            "metadata": dict(metadata),
        } if _is_name(batch_id) and _is_name(model) and abs(priority) < 2**31:
            return BatchHead(batch_id, model, priority, metadata)
    raise RequestError("invalid_message", "The message does not name its batch.")


def _plain(row: IncomingRequest) -> list[Any]:
    failure = row.failure
    return [
        row.index,
        row.line,
        row.custom_id,
        row.endpoint,
        row.payload,
        [failure.code, failure.message, failure.param] if failure else None,
    ]


def _row(document: Any) -> IncomingRequest:
    index, line, custom_id, endpoint, payload, failure = document
    checked = (
        is_count(index)
        and is_count(line)
        and _is_name(custom_id)
        and endpoint in set(Endpoint)
        and (payload is None or (isinstance(payload, str) and payload.isascii()))
        and (payload is None) == (failure is not None)
    )
    if not checked:
        raise ValueError("a row is not of the expected form")
    found = _failure(failure, line) if failure is not None else None
    return IncomingRequest(index, line, custom_id, endpoint, payload, found)


def _failure(document: Any, line: int) -> Failure:
    code, message, param = (None if text is None else storable(str(text))[0] for text in document)
    return Failure(str(code), str(message), param, line)


def is_count(value: Any) -> bool:
    """Whether it is a number that the database can hold as one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 512 and not storable(value)[1]
