"""Batches as wholes: status, list, cancel, and their end."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from batchtp.core import BatchState, BatchStatus, Failure, RequestCounts, TokenUsage
from batchtp.errors import BatchNotFoundError
from batchtp.store.database import Store
from batchtp.store.schema import batches

_COUNTS = """
    select count(*) filter (where error_code is null) as completed,
           count(*) filter (where error_code is not null) as failed,
           coalesce(sum(prompt_tokens), 0) as prompt_tokens,
           coalesce(sum(completion_tokens), 0) as completion_tokens
    from completions where batch_id = :id
"""

_STATUS = f"""
    select b.id, b.model, b.state, b.created_at, b.accepted_at, b.started_at, b.finished_at,
           b.error_code, b.error_message, b.metadata,
           coalesce(b.total, (select coalesce(sum(count), 0) from chunks where batch_id = b.id))
               as total,
           coalesce(b.completed, n.completed) as completed,
           coalesce(b.failed, n.failed) as failed,
           coalesce(b.prompt_tokens, n.prompt_tokens) as prompt_tokens,
           coalesce(b.completion_tokens, n.completion_tokens + (
               select coalesce(sum(running_tokens), 0) from chunks
               where batch_id = b.id and state = 'leased')) as completion_tokens
    from batches b,
         lateral ({_COUNTS.replace(":id", "b.id and b.finished_at is null")}) n
"""

_FINISH = f"""
    update batches b
    set state = case b.state when 'cancelling' then 'cancelled' else 'completed' end,
        started_at = coalesce(b.started_at, now()),
        finished_at = now(),
        completed = n.completed, failed = n.failed,
        prompt_tokens = n.prompt_tokens, completion_tokens = n.completion_tokens
    from ({_COUNTS}) n
    where b.id = :id and b.state in ('in_progress', 'cancelling')
      and not exists (select 1 from chunks c where c.batch_id = b.id and c.state <> 'done')
"""

_CLOSE_ANSWERED = """
    update chunks c set state = 'done', running_tokens = 0
    where c.batch_id = :id and c.state = 'ready' and not exists (
        select 1 from requests r where r.batch_id = c.batch_id and r.chunk_seq = c.seq
        and not exists (select 1 from completions d
                        where d.batch_id = r.batch_id and d."index" = r."index"))
"""

FAIL_UNANSWERED = """
    insert into completions (batch_id, "index", endpoint, text, token_ids, prompt_tokens,
        completion_tokens, finish_reason, error_code, error_message, fence, generation)
    select r.batch_id, r."index", r.endpoint,
        '', '{}', 0, 0, :reason, :code, :message, c.fence, 0
    from chunks c join requests r on r.batch_id = c.batch_id and r.chunk_seq = c.seq
    where c.batch_id = :id and (c.seq = :seq or :seq is null) and c.state in ('pending', 'ready')
    on conflict do nothing
"""


def status(store: Store, batch_id: str) -> BatchStatus:
    """The batch as it stands. Raises BatchNotFoundError."""
    with store.transaction() as connection:
        row = connection.execute(sa.text(_STATUS + " where b.id = :id"), {"id": batch_id}).first()
    if row is None:
        raise BatchNotFoundError(
            f"There is no batch {batch_id}; `batchtp list` shows those there are."
        )
    return _status(row)


def newest(store: Store, limit: int) -> Iterator[BatchStatus]:
    """Batches, the newest first."""
    query = _STATUS + " order by b.created_at desc, b.id limit :limit"
    with store.transaction() as connection:
        rows = connection.execute(sa.text(query), {"limit": limit}).all()
    yield from map(_status, rows)


def cancel(store: Store, batch_id: str) -> None:
    """Stop a batch: chunks nobody works on end now, leased ones when their worker notices.

    Nothing happens to a batch that has ended. Raises BatchNotFoundError.
    """
    with store.transaction() as connection:
        state = lock_state(connection, batch_id)
        if state is None:
            raise BatchNotFoundError(f"There is no batch {batch_id}.")
        if state.final:
            return
        connection.execute(
            sa.update(batches).where(batches.c.id == batch_id).values(state=BatchState.CANCELLING)
        )
        _end_idle_chunks(connection, batch_id)
        finish_if_done(connection, batch_id)


def end_if_cancelled(store: Store, batch_id: str) -> None:
    """If the batch is being cancelled, end its chunks that nobody holds, and it if that was all."""
    with store.transaction() as connection:
        if lock_state(connection, batch_id) is BatchState.CANCELLING:
            _end_idle_chunks(connection, batch_id)
            finish_if_done(connection, batch_id)


def lock_state(connection: sa.Connection, batch_id: str) -> BatchState | None:
    """The batch's state, which stays so for this transaction; None if there is no such batch.

    The lock leaves the key alone: rows that point at the batch may go on being written. Whoever
    takes it takes it before the lock of any chunk.
    """
    state = connection.execute(
        sa.select(batches.c.state).where(batches.c.id == batch_id).with_for_update(key_share=True)
    ).scalar()
    return None if state is None else BatchState(state)


def _end_idle_chunks(connection: sa.Connection, batch_id: str) -> None:
    parameters = {
        "id": batch_id,
        "seq": None,
        "reason": "cancelled",
        "code": "batch_cancelled",
        "message": "The batch was cancelled before this request ran.",
    }
    connection.execute(
        sa.text(FAIL_UNANSWERED).bindparams(sa.bindparam("seq", type_=sa.Integer)), parameters
    )
    connection.execute(
        sa.text(
            "update chunks set state = 'done', running_tokens = 0 "
            "where batch_id = :id and state in ('pending', 'ready')"
        ),
        {"id": batch_id},
    )


def fail(connection: sa.Connection, batch_id: str, failure: Failure) -> None:
    """End a batch whose submission was wrong: none of it runs."""
    connection.execute(
        sa.update(batches)
        .where(batches.c.id == batch_id)
        .values(
            state=BatchState.FAILED,
            finished_at=sa.func.now(),
            error_code=failure.code,
            error_message=failure.message,
        )
    )


def close_answered_chunks(connection: sa.Connection, batch_id: str) -> None:
    """Ready chunks whose every request has its row are done."""
    connection.execute(sa.text(_CLOSE_ANSWERED), {"id": batch_id})


def finish_if_done(connection: sa.Connection, batch_id: str) -> bool:
    """End the batch and freeze its counts if every chunk is done; whether it did."""
    # A statement that first waits for the row would judge the chunks as they were before it waited.
    lock_state(connection, batch_id)
    return connection.execute(sa.text(_FINISH), {"id": batch_id}).rowcount > 0


def _status(row: sa.Row[tuple[object, ...]]) -> BatchStatus:
    fields = row._mapping
    error = Failure(fields["error_code"], fields["error_message"]) if fields["error_code"] else None
    return BatchStatus(
        id=fields["id"],
        model=fields["model"],
        state=BatchState(fields["state"]),
        counts=RequestCounts(fields["total"], fields["completed"], fields["failed"]),
        usage=TokenUsage(int(fields["prompt_tokens"]), int(fields["completion_tokens"])),
        created_at=fields["created_at"],
        accepted_at=fields["accepted_at"],
        started_at=fields["started_at"],
        finished_at=fields["finished_at"],
        error=error,
        metadata=fields["metadata"],
    )
