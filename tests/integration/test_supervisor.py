"""The supervisor over real processes: ranks without a model that die, stop, raise and hang."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchtp.core import (
    Completion,
    Endpoint,
    FinishReason,
    GenerationRequest,
    RequestKey,
    SamplingParams,
)
from batchtp.errors import EngineError, GroupStartError, GroupStoppedError
from batchtp.settings import load_settings
from batchtp.testing.fake_rank import next_token
from batchtp.worker.supervisor import Supervisor

MODEL = Path(__file__).parents[1] / "data" / "checkpoints" / "awq-g32-zero-range"
DEADLINE_SECS = 30.0

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Supervisor] = []

    def build(*faults: str, **flags: object) -> Supervisor:
        settings = load_settings(
            {
                "home": str(tmp_path),
                "model": str(MODEL),
                "device": "cpu",
                "tp": 2,
                "kv_blocks": 64,
                "max_model_len": 128,
                "step_timeout_secs": 20.0,
                "startup_timeout_secs": 20.0,
                **flags,
            },
            environ={},
        )
        command = [sys.executable, "-m", "batchtp.testing.fake_rank", *faults]
        made.append(Supervisor(settings, rank_command=command))
        return made[-1]

    yield build
    for supervisor in made:
        supervisor.stop(0.0)


def request(index: int, prompt: int = 5, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        RequestKey("batch", index),
        f"r{index}",
        Endpoint.COMPLETION,
        SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}),
        prompt=tuple(10 + index + at for at in range(prompt)),
    )


def expected(item: GenerationRequest) -> tuple[int, ...]:
    assert isinstance(item.prompt, tuple)
    seen = list(item.prompt)
    for _ in range(item.sampling.max_tokens or 0):
        seen.append(next_token(seen, 0))
    return tuple(seen[len(item.prompt) :])


def generate(engine: Supervisor, items: list[GenerationRequest]) -> dict[int, Completion]:
    done: queue.Queue[Completion] = queue.Queue()
    engine.submit(items, done.put)
    found = [done.get(timeout=DEADLINE_SECS) for _ in items]
    return {completion.key.index: completion for completion in found}


def assert_undisturbed(engine: Supervisor, count: int = 12) -> dict[int, Completion]:
    items = [request(n, prompt=3 + 4 * n) for n in range(count)]
    found = generate(engine, items)
    for item in items:
        assert found[item.key.index].token_ids == expected(item), item.custom_id
    return found


def test_generates_and_stops_clean(make: Make) -> None:
    engine = make()
    engine.start()
    assert_undisturbed(engine)
    pids = engine.info().rank_pids
    assert len(pids) == 2
    engine.stop(5.0)
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(GroupStoppedError):
        engine.submit([request(0)], lambda _: None)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_blocks": 8, "block_size": 8, "max_model_len": 64},
        {"max_batched_tokens": 5},
        {"chunked_prefill": False, "max_batched_tokens": 4},
        {"max_sequences": 1},
        {"tp": 1},
        {"tp": 4},
    ],
)
def test_same_tokens_however_it_is_scheduled(make: Make, flags: dict[str, object]) -> None:
    engine = make(**flags)
    engine.start()
    assert_undisturbed(engine)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("fault", ["kill@0", "kill@7", "exit@3", "raise@2"])
def test_a_broken_rank_is_replaced_and_the_text_is_the_same(
    make: Make, fault: str, rank: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make("--fault", fault, "--rank", rank)
    engine.start()
    found = assert_undisturbed(engine)
    assert engine.info().generation == 2
    assert max(completion.generation for completion in found.values()) == 2
    named = [record.getMessage() for record in caplog.records if "rank" in record.getMessage()]
    assert any(message.startswith(f"rank {rank} ") for message in named)


def test_a_stopped_rank_is_late_and_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("--fault", "stop@4", "--rank", "1", step_timeout_secs=1.0)
    engine.start()
    pids = engine.info().rank_pids
    assert_undisturbed(engine)
    assert "rank 1 is stopped (SIGSTOP)" in caplog.text
    assert not any(alive(pid) for pid in pids)


def test_a_rank_killed_while_idle_is_replaced(make: Make) -> None:
    engine = make()
    engine.start()
    assert_undisturbed(engine, 2)
    os.kill(engine.info().rank_pids[1], signal.SIGKILL)
    assert_undisturbed(engine)
    assert engine.info().generation == 2


def test_a_poison_request_fails_alone(make: Make) -> None:
    engine = make("--fault", "kill@token:499", "--generations", "99", max_restarts=10)
    engine.start()
    poison = GenerationRequest(
        RequestKey("batch", 99),
        "poison",
        Endpoint.COMPLETION,
        SamplingParams(max_tokens=8, temperature=0.0),
        prompt=(5, 499),
    )
    items = [request(n) for n in range(5)]
    found = generate(engine, [*items[:2], poison, *items[2:]])
    failure = found[99].failure
    assert failure is not None
    assert failure.code == "engine_fault"
    for item in items:
        assert found[item.key.index].token_ids == expected(item)
    assert engine.info().restarts == 3


def test_gives_up_after_too_many_restarts(make: Make) -> None:
    engine = make("--fault", "kill@token:10", "--generations", "99", max_restarts=1, max_attempts=9)
    engine.start()
    engine.submit([request(0)], lambda _: None)
    deadline = time.monotonic() + DEADLINE_SECS
    while engine.failure() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(engine.failure(), EngineError)
    assert "killed by SIGKILL" in str(engine.failure())
    with pytest.raises(GroupStoppedError):
        engine.submit([request(1)], lambda _: None)


@pytest.mark.parametrize("fault", ["exit@start", "kill@start"])
def test_a_group_that_does_not_come_up_says_why(make: Make, fault: str) -> None:
    engine = make("--fault", fault, "--rank", "1")
    with pytest.raises(
        GroupStartError, match=r"rank 1 (exited with status 3|was killed by SIGKILL)"
    ):
        engine.start()


def test_a_rank_that_never_starts_is_late(make: Make) -> None:
    engine = make("--fault", "stop@start", "--rank", "1", startup_timeout_secs=1.0)
    with pytest.raises(GroupStartError, match="rank 1 is stopped"):
        engine.start()


def test_requests_that_cannot_run_fail_alone(make: Make) -> None:
    engine = make(kv_blocks=4, block_size=8, max_model_len=64)
    engine.start()
    long, huge = request(1, prompt=40), request(2, prompt=64)
    empty = GenerationRequest(
        RequestKey("batch", 3), "empty", Endpoint.COMPLETION, SamplingParams(), prompt=()
    )
    found = generate(engine, [request(0), long, huge, empty])
    codes = {n: c.failure.code if c.failure else None for n, c in found.items()}
    assert codes == {0: None, 1: "kv_cache_too_small", 2: "prompt_too_long", 3: "empty_prompt"}


def test_max_tokens_ends_at_the_context(make: Make) -> None:
    engine = make(max_model_len=20)
    engine.start()
    found = generate(engine, [request(0, prompt=5, max_tokens=10**9)])
    assert found[0].finish_reason is FinishReason.LENGTH
    assert len(found[0].token_ids) == 15


def test_cancel_keeps_what_was_generated(make: Make) -> None:
    engine = make("--fault", "stop@6", "--rank", "1", step_timeout_secs=2.0)
    engine.start()
    done: queue.Queue[Completion] = queue.Queue()
    item = request(0, max_tokens=100)
    engine.submit([item], done.put)
    deadline = time.monotonic() + DEADLINE_SECS
    while engine.progress([item.key]).get(item.key, 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.cancel([item.key])
    completion = done.get(timeout=DEADLINE_SECS)
    assert completion.finish_reason is FinishReason.CANCELLED
    assert completion.token_ids == expected(item)[: len(completion.token_ids)]
    assert len(completion.token_ids) >= 3


def test_ranks_die_with_their_supervisor(tmp_path: Path) -> None:
    """Real ranks ask the kernel for it; here the parent's socket closes, which is the other way."""
    script = (
        "import sys; from pathlib import Path; from batchtp.settings import load_settings\n"
        "from batchtp.worker.supervisor import Supervisor\n"
        f"s = load_settings(dict(home={str(tmp_path)!r}, model={str(MODEL)!r}, device='cpu', tp=2,"
        " kv_blocks=8), environ={})\n"
        "e = Supervisor(s, rank_command=[sys.executable, '-m', 'batchtp.testing.fake_rank'])\n"
        "e.start(); print(*e.info().rank_pids, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait(DEADLINE_SECS)
    deadline = time.monotonic() + DEADLINE_SECS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
