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
    where b.finished_at is null and b.state = 'in_progress' and not exists (
        select 1 from chunks c where c.batch_id = b.id and c.state <> 'done')
"""

_CANCELLING = "select id from batches where finished_at is null and state = 'cancelling'"

_WAITING = """
    select model, count(*) as chunks from chunks
    where state = 'ready' and ready_at < now() - make_interval(secs => :age_secs)
    group by model
"""

_OLD = """
    select id from batches where finished_at < now() - make_interval(secs => :age_secs)
    order by finished_at limit 10
"""

# In slices: a batch of millions of rows does not fit into one statement's time.
_PURGE_SLICE = """
    delete from {table} where batch_id = :id and "index" in (
        select "index" from {table} where batch_id = :id order by "index" limit 10000)
"""


def sweep(
    store: Store, *, max_attempts: int, waiting_secs: float, expire: bool = True
) -> dict[str, int]:
    """Put things right, on one worker at a time; waiting chunks by model, to ring for.

    `waiting_secs`: a chunk that has been ready for less is on its way anyhow. `expire`: whether
    leases that have expired end.
    """
    with store.transaction() as connection:
        mine = connection.execute(
            sa.text("select pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}
        ).scalar_one()
        if not mine:
            return {}
        for row in connection.execute(sa.text(_EXPIRED)).all() if expire else ():
            if row.attempts >= max_attempts:
                _give_up(connection, row.batch_id, row.seq, row.attempts)
    # Each in a transaction of its own, which locks its batch first.
    for batch_id in _ids(store, _CANCELLING):
        batches.end_if_cancelled(store, batch_id)
    for batch_id in _ids(store, _OPEN_ENDS):
        with store.transaction() as connection:
            batches.finish_if_done(connection, batch_id)
    with store.transaction() as connection:
        waiting = connection.execute(sa.text(_WAITING), {"age_secs": waiting_secs}).all()
    return {row.model: row.chunks for row in waiting}


def purge(store: Store, retention_secs: float) -> int:
    """Delete batches that ended longer ago than this, with all their rows; how many there were."""
    old = _ids(store, _OLD, age_secs=retention_secs)
    for batch_id in old:
        for table in ("completions", "requests"):
            slice_of = sa.text(_PURGE_SLICE.format(table=table))
            deleted = 1
            while deleted:
                with store.transaction() as connection:
                    deleted = connection.execute(slice_of, {"id": batch_id}).rowcount
        with store.transaction() as connection:
            connection.execute(sa.text("delete from batches where id = :id"), {"id": batch_id})
    return len(old)


def _ids(store: Store, query: str, **parameters: object) -> list[str]:
    with store.transaction() as connection:
        return list(connection.execute(sa.text(query), parameters).scalars())


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
