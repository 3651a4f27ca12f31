"""Stored rows as lines of OpenAI's batch output format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchtp.core import Endpoint
from batchtp.store.results import Row


def output_line(batch_id: str, model: str, row: Row) -> dict[str, Any]:
    """One output line; failed rows have `error` set, and keep what was generated."""
    name = f"{batch_id}-{row.index}"
    answered = row.error_code is None or row.completion_tokens > 0
    response = {
        "status_code": 200 if row.error_code is None else 400,
        "request_id": name,
        "body": _body(name, model, row),
    }
    return {
        "id": name,
        "custom_id": row.custom_id,
        "response": response if answered else None,
        "error": _error(row),
    }


def _error(row: Row) -> Mapping[str, Any] | None:
    if row.error_code is None:
        return None
    return {
        "code": row.error_code,
        "message": row.error_message,
        "param": row.error_param,
        "line": row.line,
    }


def _body(name: str, model: str, row: Row) -> dict[str, Any]:
    chat = row.endpoint == Endpoint.CHAT
    choice: dict[str, Any] = {"index": 0, "finish_reason": row.finish_reason, "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": row.text}
    else:
        choice["text"] = row.text
    if row.text_escaped:
        # NUL and half surrogate pairs stand as \\uXXXX in the text; the ids say what was meant.
        choice["text_escaped"] = True
        choice["token_ids"] = list(row.token_ids)
    return {
        "id": name,
        "object": "chat.completion" if chat else "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
            "total_tokens": row.prompt_tokens + row.completion_tokens,
        },
    }
