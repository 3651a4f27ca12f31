"""The store on a real Postgres: one row a request, whoever dies, races or comes twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from batchtp.core import BatchState, Completion, Endpoint, Failure, FinishReason, RequestKey
from batchtp.errors import BatchNotFoundError, DatabaseUnavailableError, SchemaError
from batchtp.store import Store, batches, intake, leases, migrate, results, sweep
from batchtp.store.intake import BatchHead, IncomingRequest, Seal, digest_of
from batchtp.store.leases import Lease, LeaseLostError
from batchtp.store.schema import metadata

MODEL = "m"
HEAD = BatchHead("b1", MODEL, metadata={"who": "\x00 and \ud800"})
PAYLOAD = {"url": Endpoint.COMPLETION, "body": {"prompt": "a \x00 and \ud83d"}}


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store(database_url) as opened:
        yield opened


def request(index: int, failure: Failure | None = None) -> IncomingRequest:
    payload = None if failure else json.dumps(PAYLOAD)
    return IncomingRequest(
        index, index + 1, f"id-{index}", Endpoint.COMPLETION, payload, failure=failure
    )


def parts(count: int, size: int) -> list[tuple[int, str, list[IncomingRequest]]]:
    """(seq, digest, rows) of each chunk."""
    rows = [request(index) for index in range(count)]
    return [
        (seq, f"digest{seq}", rows[at : at + size]) for seq, at in enumerate(range(0, count, size))
    ]


def seal_of(chunks: Sequence[tuple[int, str, list[IncomingRequest]]]) -> Seal:
    total = sum(len(rows) for _, _, rows in chunks)
    return Seal(total, len(chunks), digest_of([digest for _, digest, _ in chunks]))


def submit(store: Store, head: BatchHead = HEAD, count: int = 4, size: int = 2) -> None:
    chunks = parts(count, size)
    for seq, digest, rows in chunks:
        assert intake.add_chunk(store, head, seq, digest, rows) is None
    accepted = intake.seal(store, head, seal_of(chunks))
    assert accepted is not None
    assert accepted.newly
    assert accepted.error is None


def claim(store: Store, worker: str = "w", lease_secs: float = 30.0) -> Lease:
    lease = leases.claim(store, MODEL, worker, lease_secs)
    assert lease is not None
    return lease


def answers(lease: Lease, text: str = "yes") -> list[tuple[Completion, str]]:
    return [
        (
            Completion(
                RequestKey(lease.batch_id, r.index), text, (1, 2, 3), 5, FinishReason.STOP, None, 7
            ),
            Endpoint.COMPLETION,
        )
        for r in lease.requests
    ]


def work(store: Store) -> int:
    """Do every chunk there is; how many there were."""
    done = 0
    while lease := leases.claim(store, MODEL, "w", 30.0):
        leases.write(store, lease, answers(lease))
        leases.finish(store, lease)
        done += 1
    return done


def tidy(store: Store, max_attempts: int = 3) -> dict[str, int]:
    return sweep.sweep(store, max_attempts=max_attempts, waiting_secs=0.0)


def test_migrations_make_the_schema_that_the_code_has(store: Store) -> None:
    migrate.check(store)
    with store.transaction() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_long_texts_are_compressed_with_lz4_where_the_server_can(store: Store) -> None:
    query = (
        "select attrelid::regclass::text, attname from pg_attribute "
        "where attcompression = 'l' and attrelid::regclass::text in ('requests', 'completions')"
    )
    known = "select enumvals from pg_settings where name = 'default_toast_compression'"
    with store.transaction() as connection:
        found = {tuple(row) for row in connection.execute(sa.text(query))}
        can = "lz4" in connection.execute(sa.text(known)).scalar_one()
    assert found == ({("requests", "payload"), ("completions", "text")} if can else set())


def test_a_database_without_or_with_a_newer_schema_is_told_apart(empty_database_url: str) -> None:
    with Store(empty_database_url) as store:
        with pytest.raises(SchemaError, match=r"at nothing.*batchtp migrate"):
            migrate.check(store)
        with pytest.raises(SchemaError, match="batchtp migrate"):
            batches.status(store, "b1")
        migrate.upgrade(empty_database_url)
        migrate.upgrade(empty_database_url)
        migrate.check(store)
        with store.transaction() as connection:
            connection.execute(sa.text("update alembic_version set version_num = '9999'"))
        with pytest.raises(SchemaError, match="9999"):
            migrate.check(store)
        with pytest.raises(SchemaError, match="not one this version knows"):
            migrate.upgrade(empty_database_url)


def test_starters_that_migrate_at_once_take_turns(empty_database_url: str) -> None:
    threads = [threading.Thread(target=migrate.upgrade, args=(empty_database_url,)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(empty_database_url) as store:
        migrate.check(store)


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with (
        Store("postgresql+psycopg://me:secret@127.0.0.1:9/x") as store,
        pytest.raises(DatabaseUnavailableError, match=r"me:\*\*\*@127.0.0.1:9") as caught,
    ):
        store.health()
    assert "secret" not in str(caught.value)


def test_a_batch_from_its_chunks_to_its_end(store: Store) -> None:
    submit(store)
    status = batches.status(store, "b1")
    assert status.state is BatchState.IN_PROGRESS
    assert (status.counts.total, status.counts.completed) == (4, 0)
    assert work(store) == 2
    status = batches.status(store, "b1")
    assert status.state is BatchState.COMPLETED
    assert (status.counts.completed, status.counts.failed) == (4, 0)
    assert (status.usage.prompt_tokens, status.usage.completion_tokens) == (20, 12)
    assert status.started_at is not None
    assert status.finished_at is not None
    rows = list(results.in_order(store, "b1"))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert {(row.fence, row.generation, row.endpoint) for row in rows} == {
        (1, 7, Endpoint.COMPLETION)
    }
    assert [batch.id for batch in batches.newest(store, 5)] == ["b1"]


def test_the_seal_may_come_first_and_messages_twice(store: Store) -> None:
    chunks = parts(4, 2)
    assert intake.seal(store, HEAD, seal_of(chunks)) is None
    for seq, digest, rows in reversed(chunks):
        last = intake.add_chunk(store, HEAD, seq, digest, rows)
    assert last is not None
    assert last.newly
    work(store)
    for seq, digest, rows in chunks:
        again = intake.add_chunk(store, HEAD, seq, digest, rows)
        assert again is not None
        assert not again.newly
    assert intake.seal(store, HEAD, seal_of(chunks)) == again
    assert leases.claim(store, MODEL, "w", 30.0) is None
    assert batches.status(store, "b1").counts.completed == 4


def test_other_requests_under_an_accepted_id_change_nothing(store: Store) -> None:
    submit(store)
    foreign = [(seq, f"other{seq}", rows) for seq, _, rows in parts(12, 3)]
    for seq, digest, rows in foreign:
        told = intake.add_chunk(store, HEAD, seq, digest, rows)
        assert told is not None
        assert told.digest == seal_of(parts(4, 2)).digest
    intake.seal(store, HEAD, seal_of(foreign))
    assert work(store) == 2
    assert batches.status(store, "b1").state is BatchState.COMPLETED
    assert len(list(results.in_order(store, "b1"))) == 4


def test_mixed_submissions_under_one_id_are_refused(store: Store) -> None:
    mine, foreign = parts(4, 2), [(seq, f"x{seq}", rows) for seq, _, rows in parts(4, 1)]
    intake.add_chunk(store, HEAD, *mine[0])
    intake.add_chunk(store, HEAD, *foreign[1])
    told = intake.seal(store, HEAD, seal_of(mine))
    assert told is not None
    assert told.error is not None
    assert told.error.code == "digest_mismatch"
    status = batches.status(store, "b1")
    assert status.state is BatchState.FAILED
    assert status.error is not None
    assert leases.claim(store, MODEL, "w", 30.0) is None


def test_many_intakes_of_one_batch_at_once(store: Store) -> None:
    chunks = parts(60, 3)
    told: list[intake.Acceptance | None] = []

    def take(mine: list[tuple[int, str, list[IncomingRequest]]]) -> None:
        told.extend(intake.add_chunk(store, HEAD, *chunk) for chunk in mine)
        told.append(intake.seal(store, HEAD, seal_of(chunks)))

    threads = [
        threading.Thread(target=take, args=(order,))
        for order in (chunks, chunks[::-1], chunks[::2], chunks[1::2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 64
    assert sum(acceptance.newly for acceptance in told if acceptance) == 1
    assert work(store) == 20
    assert batches.status(store, "b1").counts.completed == 60


def test_bad_lines_are_rows_at_once_and_a_batch_of_them_has_ended(store: Store) -> None:
    bad = [request(i, Failure("invalid_json_line", "no", "body", i + 1)) for i in range(2)]
    intake.add_chunk(store, HEAD, 0, "d", bad)
    intake.seal(store, HEAD, Seal(2, 1, digest_of(["d"])))
    status = batches.status(store, "b1")
    assert status.state is BatchState.COMPLETED
    assert (status.counts.completed, status.counts.failed) == (0, 2)
    row = next(results.in_order(store, "b1"))
    assert (row.error_code, row.error_param, row.line) == ("invalid_json_line", "body", 1)


def test_claims_go_by_priority_then_age_and_only_for_their_model(store: Store) -> None:
    for name, priority in (("old", 0), ("new", 0), ("urgent", 5)):
        submit(store, BatchHead(name, MODEL, priority), count=1)
    submit(store, BatchHead("other", "another-model"), count=1)
    assert [claim(store).batch_id for _ in range(3)] == ["urgent", "old", "new"]
    assert leases.claim(store, MODEL, "w", 30.0) is None


def test_a_lost_lease_writes_nothing(store: Store) -> None:
    submit(store, count=2)
    zombie = claim(store, lease_secs=0.0)
    leases.write(store, zombie, answers(zombie)[:1])
    tidy(store)
    heir = claim(store)
    assert heir.fence == zombie.fence + 1
    assert [r.index for r in heir.requests] == [1]
    for attempt in (
        lambda: leases.write(store, zombie, answers(zombie, "late")),
        lambda: leases.heartbeat(store, zombie, 30.0, 1),
        lambda: leases.finish(store, zombie),
        lambda: leases.hand_back(store, zombie),
        lambda: leases.give_up(store, zombie),
    ):
        with pytest.raises(LeaseLostError, match="fence 1"):
            attempt()
    leases.write(store, heir, answers(heir))
    leases.finish(store, heir)
    assert [row.fence for row in results.in_order(store, "b1")] == [1, 2]


def test_racers_with_zombies_write_every_row_once(store: Store) -> None:
    """Leases expire at once, so every holder is overtaken and writes late."""
    submit(store, count=120, size=4)
    lost = []

    def race(number: int) -> None:
        while batches.status(store, "b1").state is not BatchState.COMPLETED:
            lease = leases.claim(store, MODEL, f"w{number}", 0.0 if number % 2 else 30.0)
            if number % 2:
                sweep.sweep(store, max_attempts=10_000, waiting_secs=0.0)
            if lease is None:
                continue
            try:
                leases.write(store, lease, answers(lease))
                leases.finish(store, lease)
            except LeaseLostError:
                lost.append(lease)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost
    assert [row.index for row in results.in_order(store, "b1")] == list(range(120))
    assert batches.status(store, "b1").counts.completed == 120


def test_heartbeats_keep_a_lease_and_tell_progress(store: Store) -> None:
    submit(store)
    lease = claim(store, lease_secs=0.0)
    assert leases.heartbeat(store, lease, 30.0, 17) is BatchState.IN_PROGRESS
    tidy(store)
    assert batches.status(store, "b1").usage.completion_tokens == 17
    leases.write(store, lease, answers(lease))
    assert batches.status(store, "b1").counts.completed == 2


def test_a_chunk_that_loses_its_workers_runs_out_of_attempts(store: Store) -> None:
    submit(store, count=3, size=3)
    first = claim(store)
    leases.write(store, first, answers(first)[:1])
    leases.give_up(store, first)
    tidy(store, max_attempts=2)
    claim(store, lease_secs=0.0)
    tidy(store, max_attempts=2)
    assert leases.claim(store, MODEL, "w", 30.0) is None
    assert batches.status(store, "b1").state is BatchState.COMPLETED
    codes = [row.error_code for row in results.in_order(store, "b1")]
    assert codes == [None, "worker_lost", "worker_lost"]


def test_handing_back_costs_no_attempt_and_frees_at_once(store: Store) -> None:
    submit(store, count=2)
    for _ in range(5):
        lease = claim(store)
        assert lease.attempt == 1
        leases.hand_back(store, lease)
    assert claim(store).fence == 6


def test_an_outage_is_no_reason_to_take_leases_away(store: Store) -> None:
    submit(store, count=2)
    lease = claim(store, lease_secs=0.0)
    sweep.sweep(store, max_attempts=3, waiting_secs=0.0, expire=False)
    assert leases.heartbeat(store, lease, 30.0, 0) is BatchState.IN_PROGRESS


def test_cancel_ends_idle_chunks_and_waits_for_held_ones(store: Store) -> None:
    submit(store)
    lease = claim(store)
    batches.cancel(store, "b1")
    assert batches.status(store, "b1").state is BatchState.CANCELLING
    assert leases.claim(store, MODEL, "w", 30.0) is None
    assert leases.heartbeat(store, lease, 30.0, 0) is BatchState.CANCELLING
    leases.write(store, lease, answers(lease)[:1])
    leases.hand_back(store, lease)
    status = batches.status(store, "b1")
    assert status.state is BatchState.CANCELLED
    assert (status.counts.completed, status.counts.failed) == (1, 3)
    batches.cancel(store, "b1")
    with pytest.raises(BatchNotFoundError):
        batches.cancel(store, "nobody")


def test_a_cancelled_batch_whose_worker_died_ends_with_the_sweep(store: Store) -> None:
    submit(store, count=2)
    claim(store, lease_secs=0.0)
    batches.cancel(store, "b1")
    tidy(store)
    assert batches.status(store, "b1").state is BatchState.CANCELLED


def test_a_batch_cancelled_before_its_seal_is_not_accepted(store: Store) -> None:
    chunks = parts(4, 2)
    intake.add_chunk(store, HEAD, *chunks[0])
    batches.cancel(store, "b1")
    intake.add_chunk(store, HEAD, *chunks[1])
    told = intake.seal(store, HEAD, seal_of(chunks))
    assert told is not None
    assert told.error is not None
    assert told.error.code == "batch_cancelled"
    assert batches.status(store, "b1").state is BatchState.CANCELLED


def test_the_sweep_ends_what_a_crash_left_open_and_rings_for_what_waits(store: Store) -> None:
    submit(store)
    assert tidy(store) == {MODEL: 2}
    first, second = claim(store), claim(store)
    for lease in (first, second):
        leases.write(store, lease, answers(lease))
    with store.transaction() as connection:
        connection.execute(sa.text("update chunks set state = 'done'"))
    assert tidy(store) == {}
    assert batches.status(store, "b1").state is BatchState.COMPLETED


def test_purge_takes_old_batches_with_all_their_rows(store: Store) -> None:
    submit(store)
    submit(store, replace(HEAD, batch_id="running"))
    batches.cancel(store, "b1")
    assert sweep.purge(store, 3600.0) == 0
    assert sweep.purge(store, 0.0) == 1
    with store.transaction() as connection:
        for table in ("batches", "chunks", "requests", "completions"):
            name = "id" if table == "batches" else "batch_id"
            left = connection.execute(sa.text(f"select distinct {name} from {table}")).scalars()
            assert set(left) <= {"running"}
    assert batches.status(store, "running").counts.total == 4


def test_text_that_postgres_cannot_hold_is_escaped_and_flagged(store: Store) -> None:
    submit(store, count=2)
    lease = claim(store)
    assert json.loads(lease.requests[0].payload) == PAYLOAD
    (odd, endpoint), (plain, _) = answers(lease)
    odd = replace(odd, text="a\x00b\ud83d", failure=Failure("x", "m\x00", None))
    leases.write(store, lease, [(odd, endpoint), (plain, endpoint)])
    rows = list(results.in_order(store, "b1"))
    assert [row.text_escaped for row in rows] == [True, False]
    assert rows[0].text == "a\\u0000b\\ud83d"
    assert rows[0].error_message == "m\\u0000"
    assert rows[0].token_ids == (1, 2, 3)


def test_rows_are_followed_in_the_order_of_their_commits_and_none_is_missed(store: Store) -> None:
    submit(store, count=6, size=2)
    slow, quick, last = (claim(store) for _ in range(3))
    with store.engine.connect() as connection, connection.begin():
        # It has its number already when the quick one comes and goes.
        connection.execute(sa.text("select pg_current_xact_id()"))
        leases.write(store, quick, answers(quick))
        assert results.finished_since(store, "b1", 0, -1) == []
    leases.write(store, slow, answers(slow))
    page = results.finished_since(store, "b1", 0, -1)
    assert [row.index for row in page] == [2, 3, 0, 1]
    leases.write(store, last, answers(last))
    more = results.finished_since(store, "b1", page[-1].transaction, page[-1].index)
    assert [row.index for row in more] == [4, 5]
