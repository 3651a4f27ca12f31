"""From messages to rows: chunks, requests, the seal, and acceptance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from psycopg.errors import UniqueViolation
from sqlalchemy.dialects.postgresql import insert

from batchtp.core import BatchState, ChunkState, Failure
from batchtp.store import batches
from batchtp.store.database import Store
from batchtp.store.schema import batches as batch_table
from batchtp.store.schema import chunks


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What every message says of its batch."""

    batch_id: str
    model: str
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """One line. `payload` is its JSON for the engine; `failure` says why it will not run."""

    index: int
    line: int
    custom_id: str
    endpoint: str
    payload: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """The end of a submission: how much there must be. `digest` is over the chunks' digests."""

    total: int
    chunk_count: int
    digest: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of a sealed batch. `error` is set when it failed; `digest` is the stored one."""

    digest: str
    total: int
    error: Failure | None = None
    newly: bool = False


_COPY_REQUESTS = """
    copy requests (batch_id, "index", chunk_seq, line, custom_id, endpoint, payload) from stdin
"""

_ADD_FAILED = sa.text("""
    insert into completions (batch_id, "index", endpoint, text, token_ids, prompt_tokens,
        completion_tokens, finish_reason, error_code, error_message, error_param, fence, generation)
    select :batch_id, r."index", r.endpoint, '', '{}', 0, 0, 'error', r.code, r.message, r.param,
        0, 0
    from unnest(cast(:index as integer[]), cast(:endpoint as text[]), cast(:code as text[]),
                cast(:message as text[]), cast(:param as text[]))
         as r ("index", endpoint, code, message, param)
    on conflict do nothing
""")


def digest_of(parts: Sequence[str]) -> str:
    """The digest of a batch from the digests of its chunks, in order."""
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def add_chunk(
    store: Store, head: BatchHead, seq: int, digest: str, rows: Sequence[IncomingRequest]
) -> Acceptance | None:
    """Put a chunk's rows in, once; the acceptance if that completed a sealed batch."""
    try:
        _take_in(store, head, seq, digest, rows)
    except UniqueViolation:
        # Rows of another submission under the same id. The batch will fail for its digest, which
        # is of chunks, so that the chunk must be there.
        _take_in(store, head, seq, digest, ())
    # On its own, for it takes a lock that would wait for the shared one of another chunk's intake.
    with store.transaction() as connection:
        return _accept_if_complete(connection, head.batch_id)


def _take_in(
    store: Store, head: BatchHead, seq: int, digest: str, rows: Sequence[IncomingRequest]
) -> None:
    with store.transaction() as connection:
        _add_batch(connection, head)
        # A share lock: chunks of one batch come in side by side, and none after its acceptance.
        state = connection.execute(
            sa.select(batch_table.c.state)
            .where(batch_table.c.id == head.batch_id)
            .with_for_update(read=True)
        ).scalar_one()
        if state == BatchState.VALIDATING:
            _add_rows(connection, head, seq, digest, rows)


def seal(store: Store, head: BatchHead, seal: Seal) -> Acceptance | None:
    """Note how much the batch must have; the acceptance if all of it is there already."""
    with store.transaction() as connection:
        _add_batch(connection, head)
        batches.lock_state(connection, head.batch_id)
        connection.execute(
            sa.update(batch_table)
            .where(batch_table.c.id == head.batch_id, batch_table.c.digest.is_(None))
            .values(total=seal.total, chunk_count=seal.chunk_count, digest=seal.digest)
        )
        return _accept_if_complete(connection, head.batch_id)


def _add_batch(connection: sa.Connection, head: BatchHead) -> None:
    connection.execute(
        insert(batch_table)
        .values(
            id=head.batch_id,
            model=head.model,
            state=BatchState.VALIDATING,
            priority=head.priority,
            metadata=json.loads(json.dumps(dict(head.metadata)).replace("\\u0000", "\ufffd")),
        )
        .on_conflict_do_nothing()
    )


def _add_rows(
    connection: sa.Connection,
    head: BatchHead,
    seq: int,
    digest: str,
    rows: Sequence[IncomingRequest],
) -> None:
    values = {
        "batch_id": head.batch_id,
        "seq": seq,
        "model": head.model,
        "priority": head.priority,
        "state": ChunkState.PENDING,
        "count": len(rows),
        "digest": digest,
    }
    statement = insert(chunks).values(values).on_conflict_do_nothing()
    if not connection.execute(statement).rowcount:
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(_COPY_REQUESTS) as copy:
        for row in rows:
            named = (row.index, seq, row.line, row.custom_id, row.endpoint, row.payload)
            copy.write_row((head.batch_id, *named))
    failed = [(row, row.failure) for row in rows if row.failure is not None]
    if failed:
        connection.execute(
            _ADD_FAILED,
            {
                "batch_id": head.batch_id,
                "index": [row.index for row, _ in failed],
                "endpoint": [row.endpoint for row, _ in failed],
                "code": [failure.code for _, failure in failed],
                "message": [failure.message for _, failure in failed],
                "param": [failure.param for _, failure in failed],
            },
        )


def _accept_if_complete(connection: sa.Connection, batch_id: str) -> Acceptance | None:
    # The lock is not for every chunk: it waits for all that come in beside it. Who seals waits for
    # them too, so that a chunk which sees no seal is seen by the seal.
    digest = sa.select(batch_table.c.digest).where(batch_table.c.id == batch_id)
    if connection.execute(digest).scalar() is None:
        return None
    # Two messages that each complete the batch take turns.
    batches.lock_state(connection, batch_id)
    batch = connection.execute(sa.select(batch_table).where(batch_table.c.id == batch_id)).one()
    if batch.state != BatchState.VALIDATING:
        return Acceptance(batch.digest, batch.total, _why_not(batch))
    stored = connection.execute(
        sa.select(chunks.c.digest, chunks.c.count.label("rows"))
        .where(chunks.c.batch_id == batch_id)
        .order_by(chunks.c.seq)
    ).all()
    if len(stored) < batch.chunk_count:
        return None
    total = sum(row.rows for row in stored)
    if digest_of([row.digest for row in stored]) != batch.digest or total != batch.total:
        failure = Failure(
            "digest_mismatch",
            "What arrived under this batch id is not what was sealed. Submit again, under a "
            "new batch id.",
        )
        batches.fail(connection, batch_id, failure)
        return Acceptance(batch.digest, batch.total, failure, newly=True)
    _open(connection, batch_id)
    return Acceptance(batch.digest, batch.total, newly=True)


def _why_not(batch: sa.Row[Any]) -> Failure | None:
    if batch.error_code:
        return Failure(batch.error_code, batch.error_message)
    if batch.accepted_at is None:
        return Failure("batch_cancelled", "It was cancelled before it was complete.")
    return None


def _open(connection: sa.Connection, batch_id: str) -> None:
    connection.execute(
        sa.update(batch_table)
        .where(batch_table.c.id == batch_id)
        .values(state=BatchState.IN_PROGRESS, accepted_at=sa.func.now())
    )
    connection.execute(
        sa.update(chunks)
        .where(chunks.c.batch_id == batch_id)
        .values(state=ChunkState.READY, ready_at=sa.func.now())
    )
    # A chunk of nothing but bad lines has no work in it.
    batches.close_answered_chunks(connection, batch_id)
    batches.finish_if_done(connection, batch_id)
