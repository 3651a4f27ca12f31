"""Who may work on a chunk: claim, heartbeat, write under the fence, give back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from batchtp.core import BatchState, Completion
from batchtp.errors import ServiceError
from batchtp.store import batches
from batchtp.store.database import Store


class LeaseLostError(ServiceError):
    """Another worker has the chunk now, or the batch is gone: nothing of it was written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one chunk until it expires, and the requests it has left."""

    batch_id: str
    seq: int
    fence: int
    attempt: int
    requests: tuple[LeasedRequest, ...]


@dataclass(frozen=True, slots=True)
class LeasedRequest:
    """A request without a row yet, as it was submitted. `payload` is JSON that nobody checked."""

    index: int
    line: int
    custom_id: str
    payload: str


_CLAIM = """
    update chunks c
    set state = 'leased', fence = c.fence + 1, attempts = c.attempts + 1, worker = :worker,
        running_tokens = 0, lease_expires_at = now() + make_interval(secs => :lease_secs)
    from (select batch_id, seq from chunks
          where model = :model and state = 'ready'
          order by priority desc, ready_at, seq
          limit 1 for update skip locked) best
    where c.batch_id = best.batch_id and c.seq = best.seq
    returning c.batch_id, c.seq, c.fence, c.attempts,
        (select started_at is null from batches where id = c.batch_id) as first
"""

_STARTED = "update batches set started_at = now() where id = :id and started_at is null"

_LEFT = """
    select r."index" as position, r.line, r.custom_id, r.payload from requests r
    where r.batch_id = :batch_id and r.chunk_seq = :seq and not exists (
        select 1 from completions d where d.batch_id = r.batch_id and d."index" = r."index")
    order by r."index"
"""

_HEARTBEAT = """
    update chunks c
    set lease_expires_at = now() + make_interval(secs => :lease_secs), running_tokens = :tokens
    from batches b
    where c.batch_id = :batch_id and c.seq = :seq and c.fence = :fence and c.state = 'leased'
      and b.id = c.batch_id
    returning b.state
"""

_HELD = """
    select 1 from chunks
    where batch_id = :batch_id and seq = :seq and fence = :fence and state = 'leased'
    for share
"""

_RELEASE = """
    update chunks
    set state = :state, worker = null, lease_expires_at = null, running_tokens = 0,
        attempts = attempts - :refund
    where batch_id = :batch_id and seq = :seq and fence = :fence and state = 'leased'
"""


_EXPIRE = """
    update chunks set lease_expires_at = now() - interval '1 microsecond'
    where batch_id = :batch_id and seq = :seq and fence = :fence and state = 'leased'
"""


# Columns of a written row, in the order of `_row`. Token ids go as array literals: an array of
# arrays of different lengths is no Postgres value.
_WRITTEN = {
    "index": "integer",
    "endpoint": "text",
    "text": "text",
    "text_escaped": "boolean",
    "token_ids": "text",
    "prompt_tokens": "integer",
    "completion_tokens": "integer",
    "finish_reason": "text",
    "error_code": "text",
    "error_message": "text",
    "error_param": "text",
    "generation": "integer",
}
_NAMES = ", ".join(f'"{name}"' for name in _WRITTEN)
_WRITE = sa.text(f"""
    insert into completions (batch_id, fence, {_NAMES})
    select :batch_id, :fence, {_NAMES.replace('"token_ids"', 'cast("token_ids" as integer[])')}
    from unnest({", ".join(f"cast(:{name} as {kind}[])" for name, kind in _WRITTEN.items())})
         as r ({_NAMES})
    on conflict do nothing
""")


def claim(store: Store, model: str, worker: str, lease_secs: float) -> Lease | None:
    """Take the best chunk there is for this model; None when there is none.

    The attempt is counted with the claim, before any work: a chunk that kills its worker runs out.
    """
    with store.transaction() as connection:
        row = connection.execute(
            sa.text(_CLAIM), {"model": model, "worker": worker, "lease_secs": lease_secs}
        ).first()
        if row is None:
            return None
        left = connection.execute(sa.text(_LEFT), {"batch_id": row.batch_id, "seq": row.seq})
        lease = Lease(
            batch_id=row.batch_id,
            seq=row.seq,
            fence=row.fence,
            attempt=row.attempts,
            requests=tuple(
                LeasedRequest(r.position, r.line, r.custom_id, r.payload or "") for r in left
            ),
        )
    if row.first:
        # On its own: cancel locks the batch before its chunks, so a claim must not do the reverse.
        with store.transaction() as connection:
            connection.execute(sa.text(_STARTED), {"id": lease.batch_id})
    return lease


def heartbeat(store: Store, lease: Lease, lease_secs: float, tokens: int) -> BatchState:
    """Keep the lease, note the tokens of running requests; the batch's state.

    Raises LeaseLostError.
    """
    with store.transaction() as connection:
        state = connection.execute(
            sa.text(_HEARTBEAT), {**_name(lease), "lease_secs": lease_secs, "tokens": tokens}
        ).scalar()
    if state is None:
        raise _lost(lease)
    return BatchState(state)


def write(store: Store, lease: Lease, finished: Sequence[tuple[Completion, str]]) -> None:
    """Write (completion, endpoint) rows, all or none, if the lease still holds.

    A row that is there already stays as it is. Raises LeaseLostError.
    """
    with store.transaction() as connection:
        _check_held(connection, lease)
        rows = [_row(completion, endpoint) for completion, endpoint in finished]
        connection.execute(
            _WRITE,
            {
                "batch_id": lease.batch_id,
                "fence": lease.fence,
                **{name: [row[at] for row in rows] for at, name in enumerate(_WRITTEN)},
            },
        )


def finish(store: Store, lease: Lease) -> bool:
    """The chunk has all its rows; whether that ended its batch. Raises LeaseLostError."""
    with store.transaction() as connection:
        _release(connection, lease, "done", refund=0)
    # After the commit above: of two workers that finish the last two chunks, the later sees both.
    with store.transaction() as connection:
        return batches.finish_if_done(connection, lease.batch_id)


def hand_back(store: Store, lease: Lease) -> None:
    """Somebody else may have the chunk at once; the attempt does not count.

    Raises LeaseLostError.
    """
    with store.transaction() as connection:
        _release(connection, lease, "ready", refund=1)
    batches.end_if_cancelled(store, lease.batch_id)


def give_up(store: Store, lease: Lease) -> None:
    """The work failed: as if the lease had expired. The attempt counts. Raises LeaseLostError."""
    with store.transaction() as connection:
        if not connection.execute(sa.text(_EXPIRE), _name(lease)).rowcount:
            raise _lost(lease)


def _release(connection: sa.Connection, lease: Lease, state: str, refund: int) -> None:
    parameters = {**_name(lease), "state": state, "refund": refund}
    if not connection.execute(sa.text(_RELEASE), parameters).rowcount:
        raise _lost(lease)


def _check_held(connection: sa.Connection, lease: Lease) -> None:
    if connection.execute(sa.text(_HELD), _name(lease)).first() is None:
        raise _lost(lease)


def _name(lease: Lease) -> dict[str, Any]:
    return {"batch_id": lease.batch_id, "seq": lease.seq, "fence": lease.fence}


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"The lease of chunk {lease.seq} of {lease.batch_id} (fence {lease.fence}) is lost."
    )


def _row(completion: Completion, endpoint: str) -> tuple[Any, ...]:
    text, escaped = storable(completion.text)
    failure = completion.failure
    return (
        completion.key.index,
        endpoint,
        text,
        escaped,
        f"{{{','.join(map(str, completion.token_ids))}}}",
        completion.prompt_tokens,
        len(completion.token_ids),
        str(completion.finish_reason),
        failure.code if failure else None,
        storable(failure.message)[0] if failure else None,
        failure.param if failure else None,
        completion.generation,
    )


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(text: str) -> tuple[str, bool]:
    """Text that Postgres can hold, and whether NUL or lone surrogates were written as \\uXXXX."""
    stored, count = _UNSTORABLE.subn(lambda match: f"\\u{ord(match[0]):04x}", text)
    return stored, count > 0
