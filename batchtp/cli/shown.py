"""A batch as commands show it: for machines and for people."""

from __future__ import annotations

from typing import Any

from batchtp.core import BatchStatus


def status_document(status: BatchStatus) -> dict[str, Any]:
    """The status in the shape of an OpenAI batch object."""
    error = status.error
    return {
        "id": status.id,
        "object": "batch",
        "model": status.model,
        "status": status.state.value,
        "request_counts": {
            "total": status.counts.total,
            "completed": status.counts.completed,
            "failed": status.counts.failed,
        },
        "usage": {
            "prompt_tokens": status.usage.prompt_tokens,
            "completion_tokens": status.usage.completion_tokens,
        },
        "created_at": _seconds(status.created_at),
        "accepted_at": _seconds(status.accepted_at),
        "in_progress_at": _seconds(status.started_at),
        "finished_at": _seconds(status.finished_at),
        "error": {"code": error.code, "message": error.message} if error else None,
        "metadata": dict(status.metadata),
    }


def status_rows(status: BatchStatus) -> list[tuple[str, str]]:
    """The status as (what, value) lines."""
    counts, usage = status.counts, status.usage
    rows = [
        ("batch", status.id),
        ("model", status.model),
        ("state", status.state.value),
        ("requests", f"{counts.total} ({counts.completed} done, {counts.failed} failed)"),
        ("tokens", f"{usage.prompt_tokens} read, {usage.completion_tokens} written"),
        ("created", _time(status.created_at)),
        ("accepted", _time(status.accepted_at)),
        ("started", _time(status.started_at)),
        ("finished", _time(status.finished_at)),
    ]
    if status.error:
        rows.append(("error", f"{status.error.code}: {status.error.message}"))
    return rows


def _seconds(at: Any) -> int | None:
    return int(at.timestamp()) if at is not None else None


def _time(at: Any) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at is not None else "-"
