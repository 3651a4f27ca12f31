"""Client, Valkey, Celery workers and Postgres, all real; only the engine is fake."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery.concurrency.prefork import TaskPool as ForkingPool
from queue_rig import LONG, MODEL, Worker, quick, run_celery, wait_for
from sqlalchemy import text

from batchtp.client import Batch, Client
from batchtp.core import BatchState
from batchtp.errors import (
    BatchConflictError,
    BrokerUnavailableError,
    InputError,
    InvalidLinesError,
    NotAcceptedError,
    SettingsError,
)
from batchtp.queue.celery_config import (
    GENERATE_TASK,
    INTAKE_TASK,
    generate_queue,
    intake_queue,
    make_celery,
)
from batchtp.queue.submit import connect
from batchtp.services import Endpoints
from batchtp.settings import Settings, load_settings
from batchtp.store import Store, intake
from batchtp.store.intake import BatchHead, IncomingRequest, Seal, digest_of
from batchtp.testing.fake_engine import FakeEngine
from batchtp.worker.app import make_app
from batchtp.worker.bootstep import RuntimeStep

Start = Callable[..., Worker]


@pytest.fixture
def rig(settings: Settings) -> Settings:
    return quick(settings)


@pytest.fixture
def client(rig: Settings) -> Iterator[Client]:
    with Client(rig) as opened:
        yield opened


@pytest.fixture
def start(rig: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts workers; at the end none is left."""
    started: list[Worker] = []

    def make(settings: Settings | None = None, *, hold: bool = False, fail: bool = False) -> Worker:
        folder = tmp_path / f"worker-{len(started)}"
        started.append(Worker(settings or rig, folder, hold=hold, fail=fail))
        return started[-1]

    yield make
    for worker in started:
        worker.kill()


def prompts(count: int, prompt: str = "p") -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": f"{prompt}{i}", "max_tokens": 4000} for i in range(count)]


def finished(batch: Batch) -> list[Any]:
    """The rows of a batch that has completed, each once."""
    status = batch.wait(60)
    assert status.state is BatchState.COMPLETED
    rows = list(batch.results())
    assert [row.index for row in rows] == list(range(status.counts.total))
    return rows


def running(batch: Batch, tokens: int = 1) -> None:
    wait_for(lambda: batch.status().usage.completion_tokens >= tokens, "progress")


def fences(batch: Batch) -> set[int]:
    return {row.fence for row in batch.results()}


def test_from_a_file_to_output_lines(client: Client, start: Start, tmp_path: Path) -> None:
    worker = start()
    path = tmp_path / "p.jsonl"
    lines: list[Any] = [
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hi\x00"}], "model": MODEL},
        },
        {"id": "short", "prompt": "one two", "stop": "two"},
        {"id": "fails", "prompt": "FAIL"},
        {"id": "odd", "prompt": "p", "tools": []},
        {"id": "long", "prompt": "y" * 5000},
    ]
    path.write_text("\n".join([*map(json.dumps, lines), "{"]) + "\n" + "\n")
    batch = client.submit(path, metadata={"who": "me"})
    followed = {row.custom_id: row for row in batch}
    found = list(batch.output_lines())
    names = ["chat", "short", "fails", "odd", "long", "request-6"]
    assert [each["custom_id"] for each in found] == names
    assert set(followed) == set(names)
    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == "echo: hi\\u0000"
    assert found[0]["response"]["body"]["choices"][0]["text_escaped"]
    assert found[1]["response"]["body"]["choices"][0] == {
        "index": 0,
        "text": "echo: one ",
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert [each["error"] and each["error"]["code"] for each in found] == [
        None,
        None,
        "fake_failure",
        "unknown_parameter",
        "prompt_too_long",
        "invalid_json_line",
    ]
    assert (found[5]["error"]["line"], found[3]["error"]["param"]) == (6, "tools")
    status = batch.status()
    assert status.state is BatchState.COMPLETED
    assert (status.counts.completed, status.counts.failed) == (2, 4)
    assert status.metadata == {"who": "me"}
    assert client.serving(MODEL)
    assert not client.serving("another")
    assert [each.id for each in client.list()] == [batch.id]
    assert "one two" not in worker.log()
    assert worker.terminate() == 0
    assert client.served_models() == frozenset()


def test_an_id_again_is_the_same_batch_and_other_requests_are_refused(
    client: Client, start: Start
) -> None:
    start()
    rows = finished(client.submit(prompts(9), batch_id="mine"))
    again = client.submit(prompts(9), batch_id="mine")
    assert finished(again) == rows
    with pytest.raises(BatchConflictError, match="other requests"):
        client.submit(prompts(40), batch_id="mine")
    finished(client.submit(prompts(1), batch_id="next"))
    assert finished(again) == rows


def test_messages_that_come_twice_or_are_nonsense_change_nothing(
    client: Client, start: Start, rig: Settings
) -> None:
    start()
    app = make_celery(rig)
    redis = connect(rig)
    # Three messages on their way, each put into the queue again.
    batch = client.submit(prompts(8), wait=False)
    queue = f"{rig.key_prefix}:{intake_queue(rig)}"
    for message in redis.lrange(queue, 0, -1):
        redis.lpush(queue, message)
    for arguments in (
        [{}, 0, ""],
        [{"batch_id": "x", "model": MODEL, "priority": 0, "metadata": {}}, -1, "AA=="],
        [],
    ):
        app.send_task(INTAKE_TASK, args=arguments, queue=intake_queue(rig))
    for _ in range(5):
        app.send_task(GENERATE_TASK, queue=generate_queue(rig, MODEL))
    assert {row.fence for row in finished(batch)} == {1}
    assert len(list(client.list())) == 1
    app.close()
    redis.close()


def test_a_killed_workers_chunks_go_to_another_and_its_rows_stay(
    client: Client, start: Start
) -> None:
    doomed = start(hold=True)
    # Per chunk one short prompt, which ends, and three that do not.
    requests = [
        {"id": f"r{i}", "prompt": "s" if i % 4 == 0 else LONG, "max_tokens": 4000}
        for i in range(16)
    ]
    batch = client.submit(requests)
    wait_for(lambda: batch.status().counts.completed == 4, "the short ones' end")
    doomed.kill()
    assert batch.status().counts.completed == 4
    start()
    rows = finished(batch)
    assert [row.fence for row in rows] == [1 if i % 4 == 0 else 2 for i in range(16)]


def test_a_lease_outlives_its_time_while_its_worker_lives(client: Client, start: Start) -> None:
    """Longer than lease and visibility timeout, with a second worker that waits for work."""
    first = start(hold=True)
    batch = client.submit(prompts(4, LONG))
    running(batch)
    second = start()
    wait_for(lambda: len(client.served_models()) and "serving" in second.log(), "a second worker")
    running(batch, tokens=4 * 20 * 5)
    first.release()
    finished(batch)
    assert fences(batch) == {1}


def test_doorbells_that_redis_lost_are_rung_again(
    client: Client, start: Start, rig: Settings
) -> None:
    start()
    finished(client.submit(prompts(1), batch_id="first"))
    redis = connect(rig)
    redis.flushall()
    # Accepted with no word to any worker.
    with Store(rig.database_url) as store:
        rows = [
            IncomingRequest(
                0,
                1,
                "a",
                "/v1/completions",
                json.dumps({"url": "/v1/completions", "body": {"prompt": "p"}}),
            )
        ]
        head = BatchHead("quiet", MODEL)
        intake.add_chunk(store, head, 0, "d", rows)
        intake.seal(store, head, Seal(1, 1, digest_of(["d"])))
    finished(client.batch("quiet"))
    finished(client.submit(prompts(5), batch_id="after"))
    # Every connection cut, as when the server restarts.
    redis.client_kill_filter(_type="normal", skipme=True)
    finished(client.submit(prompts(5), batch_id="reconnected"))
    redis.close()


def test_cancel_stops_what_runs_and_keeps_what_there_is(client: Client, start: Start) -> None:
    start(hold=True)
    batch = client.submit([{"prompt": "s"}, *prompts(11, LONG)])
    wait_for(lambda: batch.status().counts.completed == 1, "the short one's end")
    running(batch, tokens=30)
    batch.cancel()
    status = batch.wait(60)
    assert status.state is BatchState.CANCELLED
    assert (status.counts.completed, status.counts.failed) == (1, 11)
    rows = list(batch.results())
    assert {row.error_code for row in rows} == {None, "batch_cancelled"}
    assert any(row.error_code and row.text.startswith("echo: x") for row in rows)
    assert len(list(batch)) == 12


def test_sigterm_hands_back_what_the_grace_time_did_not_finish(
    client: Client, start: Start, rig: Settings
) -> None:
    worker = start(hold=True)
    batch = client.submit(prompts(8, LONG))
    running(batch)
    assert worker.terminate() == 0
    with Store(rig.database_url) as store, store.transaction() as connection:
        chunks = connection.execute(text("select state, attempts from chunks")).all()
    assert [tuple(chunk) for chunk in chunks] == [("ready", 0), ("ready", 0)]
    start()
    finished(batch)
    assert fences(batch) == {2}


def test_sigterm_lets_what_runs_finish_within_the_grace_time(
    client: Client, start: Start, rig: Settings
) -> None:
    worker = start(replace(rig, grace_secs=60.0, worker_chunks=1), hold=True)
    batch = client.submit(prompts(8, LONG))
    running(batch)
    worker.process.terminate()
    wait_for(lambda: "stopping" in worker.log(), "the worker's notice")
    worker.release()
    assert worker.process.wait(60) == 0
    assert batch.status().counts.completed == 4


def test_a_second_signal_ends_the_worker_at_once(
    client: Client, start: Start, rig: Settings
) -> None:
    worker = start(replace(rig, grace_secs=600.0), hold=True)
    running(client.submit(prompts(1, LONG)))
    worker.process.terminate()
    wait_for(lambda: "stopping" in worker.log(), "the worker's notice")
    assert worker.terminate() == 128 + 15


def test_a_dead_engine_ends_its_worker_with_the_reason(client: Client, start: Start) -> None:
    worker = start(hold=True)
    batch = client.submit(prompts(4, LONG))
    running(batch)
    worker.fail()
    assert worker.process.wait(60) != 0
    assert "RankFaultError: rank 1 was killed" in worker.log()
    start()
    finished(batch)


def test_a_worker_that_cannot_serve_says_why(
    start: Start, rig: Settings, empty_database_url: str
) -> None:
    unmigrated = start(replace(rig, database_url=empty_database_url))
    broken = start(fail=True)
    assert unmigrated.process.wait(60) != 0
    assert "run `batchtp migrate`" in unmigrated.log()
    assert broken.process.wait(60) != 0
    assert "rank 1 was killed" in broken.log()


def test_any_pool_but_threads_is_refused(rig: Settings) -> None:
    done = run_celery(rig, "--pool", "solo")
    assert done.returncode != 0
    assert "Use --pool threads" in done.stderr
    with pytest.raises(SettingsError, match="Use --pool threads"):
        RuntimeStep(SimpleNamespace(pool_cls=ForkingPool))


def test_a_workers_queues_get_their_own_messages_only(rig: Settings) -> None:
    queues = make_app(rig, FakeEngine()).amqp.queues.consume_from
    names = {intake_queue(rig), generate_queue(rig, MODEL)}
    assert {(q.name, q.exchange.name, q.routing_key) for q in queues.values()} == {
        (name, name, name) for name in names
    }


def test_rows_wait_while_postgres_is_away(
    client: Client, start: Start, rig: Settings, endpoints: Endpoints
) -> None:
    worker = start(hold=True)
    batch = client.submit(prompts(4, LONG))
    running(batch)
    name = rig.database_url.split("/")[3].partition("?")[0]
    url = endpoints.database_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"alter database {name} with allow_connections false")
        server.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name]
        )
        late = client.submit(prompts(2), batch_id="late", wait=False)
        worker.release()
        wait_for(lambda: "4 rows wait" in worker.log(), "a write that fails")
        wait_for(lambda: "intake waits" in worker.log(), "an intake that fails")
        server.execute(f"alter database {name} with allow_connections true")
    finished(batch)
    finished(late)
    assert fences(batch) == {1}


def test_a_submission_that_nobody_takes_in_says_so(client: Client, rig: Settings) -> None:
    impatient = Client(replace(rig, accept_timeout_secs=0.3))
    with impatient, pytest.raises(NotAcceptedError, match=r"Is a worker running\?"):
        impatient.submit(prompts(1))


def test_strict_sends_nothing_unless_every_line_is_good(
    client: Client, rig: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\nno\n{"prompt": ""}\n')
    redis = connect(rig)
    for source in (path, str(path), [{"prompt": "a"}, {"prompt": 5}, {"prompt": ""}]):
        with pytest.raises(InvalidLinesError) as caught:
            client.submit(source, strict=True, wait=False)
        assert [line for line, _, _ in caught.value.lines] == [2, 3]
    for empty in ([], tmp_path / "empty"):
        (tmp_path / "empty").write_bytes(b"\n\n")
        with pytest.raises(InputError) as nothing:
            client.submit(empty, wait=False)
        assert nothing.value.code == "empty_file"
    assert redis.keys(f"{rig.key_prefix}:*") == []
    redis.close()


def test_a_broker_that_is_not_there_is_named_in_bounded_time() -> None:
    flags = {"redis_url": "redis://:secret@127.0.0.1:9/0", "database_url": "postgresql://x@/y"}
    with Client(load_settings(flags, environ={})) as client:
        for attempt in (lambda: client.submit(["p"]), lambda: client.serving(MODEL)):
            with pytest.raises(BrokerUnavailableError, match=r":\*\*\*@127.0.0.1:9") as caught:
                attempt()
            assert "secret" not in str(caught.value)


def test_submission_is_constant_in_memory(client: Client, rig: Settings, tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for number in range(800):
            file.write(json.dumps({"id": f"r{number}", "prompt": "y" * 10_000}) + "\n")
    tracemalloc.start()
    try:
        client.submit(path, wait=False)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000 < path.stat().st_size / 2


def test_clients_may_share_one_submitter(client: Client, start: Start) -> None:
    start()
    batches: list[Batch] = []
    threads = [
        threading.Thread(target=lambda: batches.append(client.submit(prompts(6)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(finished(batch)) for batch in batches] == [6, 6, 6, 6]
