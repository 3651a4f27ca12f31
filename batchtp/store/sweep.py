"""What nobody else will notice: expired leases, lost doorbells, ends that a crash left open."""

from __future__ import annotations

import sqlalchemy as sa

from batchtp.store import batches
from batchtp.store.database import Store

# Any number that no other user of the database takes for an advisory lock.
_LOCK = 0x62746370

_EXPIRED = """
    update chunks set state = 'ready', worker = null, lease_expires_at = null, running_tokens = 0
    where state = 'leased' and lease_expires_at < now()
    returning batch_id, seq, attempts
"""

_EXHAUSTED = """
    update chunks set state = 'done' where batch_id = :id and seq = :seq and state = 'ready'
"""

_OPEN_ENDS = """
    select b.id from batches b
    where b.finished_at is null and b.state in ('in_progress', 'cancelling') and not exists (
        select 1 from chunks c where c.batch_id = b.id and c.state <> 'done')
"""

_WAITING = """
    select model, count(*) as chunks from chunks
    where state = 'ready' and ready_at < now() - make_interval(secs => :age_secs)
    group by model
"""

_PURGE = """
    delete from batches where id in (
        select id from batches
        where finished_at < now() - make_interval(secs => :age_secs)
        order by finished_at limit 10)
"""


def sweep(
    store: Store, *, max_attempts: int, waiting_secs: float, retention_secs: float
) -> dict[str, int]:
    """Put things right, on one worker at a time; waiting chunks by model, to ring for.

    `waiting_secs`: a chunk that has been ready for less is on its way anyhow.
    """
    with store.transaction() as connection:
        mine = connection.execute(
            sa.text("select pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}
        ).scalar_one()
        if not mine:
            return {}
        for row in connection.execute(sa.text(_EXPIRED)).all():
            if row.attempts >= max_attempts:
                _give_up(connection, row.batch_id, row.seq, row.attempts)
        cancelling = "select id from batches where state = 'cancelling'"
        for batch_id in connection.execute(sa.text(cancelling)).scalars().all():
            batches.end_idle_chunks(connection, batch_id)
        for batch_id in connection.execute(sa.text(_OPEN_ENDS)).scalars().all():
            batches.finish_if_done(connection, batch_id)
        connection.execute(sa.text(_PURGE), {"age_secs": retention_secs})
        waiting = connection.execute(sa.text(_WAITING), {"age_secs": waiting_secs}).all()
    return {row.model: row.chunks for row in waiting}


def _give_up(connection: sa.Connection, batch_id: str, seq: int, attempts: int) -> None:
    parameters = {
        "id": batch_id,
        "seq": seq,
        "reason": "error",
        "code": "worker_lost",
        "message": f"{attempts} workers were lost while they had this request.",
    }
    connection.execute(
        sa.text(batches.FAIL_UNANSWERED).bindparams(sa.bindparam("seq", type_=sa.Integer)),
        parameters,
    )
    connection.execute(sa.text(_EXHAUSTED), {"id": batch_id, "seq": seq})
