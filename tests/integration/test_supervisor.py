"""The supervisor over real processes: ranks without a model that die, stop, raise and hang."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import (
    DEADLINE_SECS,
    Answers,
    engine_settings,
    expected_ids,
    fake_ranks,
    make_request,
)

from batchtp.core import Completion, FinishReason, GenerationRequest
from batchtp.errors import CheckpointError, EngineError, GroupStartError, GroupStoppedError
from batchtp.worker.restarts import RestartPolicy
from batchtp.worker.sequence import seed_of
from batchtp.worker.supervisor import Supervisor

# A prompt token that fake ranks never draw: a fault can wait for it.
POISON = 5

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Builds and starts supervisors at tp 2, whose restarts do not wait."""
    caplog.set_level(logging.INFO)
    made: list[Supervisor] = []

    def build(
        *faults: str, rank: int = 1, generations: int = 1, start: bool = True, **flags: object
    ) -> Supervisor:
        settings = engine_settings(tmp_path, **({"tp": 2} | flags))
        restarts = RestartPolicy(settings.max_restarts, delays_secs=(0.0,))
        command = fake_ranks(*faults, rank=rank, generations=generations)
        made.append(Supervisor(settings, rank_command=command, restarts=restarts))
        if start:
            made[-1].start()
        return made[-1]

    yield build
    for supervisor in made:
        supervisor.stop(0.0)


def some_requests(count: int = 12, **sampling: object) -> list[GenerationRequest]:
    """Prompts of all lengths, none like another."""
    return [make_request(n, range(20 + n, 23 + 5 * n), **sampling) for n in range(count)]


def generate(engine: Supervisor, requests: list[GenerationRequest]) -> dict[int, Completion]:
    answers = Answers()
    engine.submit(requests, answers.sink)
    return answers.take(len(requests))


def assert_undisturbed(engine: Supervisor, count: int = 12) -> dict[int, Completion]:
    requests = some_requests(count)
    found = generate(engine, requests)
    for request in requests:
        assert found[request.key.index].token_ids == wanted(request), request.custom_id
    return found


def wanted(request: GenerationRequest, seed: int = 0) -> tuple[int, ...]:
    assert isinstance(request.prompt, tuple)
    return expected_ids(request.prompt, request.sampling.max_tokens or 0, seed)


def assert_soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def faults_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


def test_generates_and_stops_clean(make: Make) -> None:
    engine = make()
    assert_undisturbed(engine)
    pids = engine.info().rank_pids
    assert len(pids) == 2
    engine.stop(5.0)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_blocks": 20},
        {"kv_blocks": 20, "chunked_prefill": False},
        {"max_batched_tokens": 5},
        {"chunked_prefill": False, "max_batched_tokens": 4},
        {"max_sequences": 1},
        {"tp": 1},
        {"tp": 4},
    ],
    ids=str,
)
def test_same_tokens_however_it_is_scheduled(make: Make, flags: dict[str, object]) -> None:
    assert_undisturbed(make(**flags))


# With a budget of 16 the prompts take the first dozen steps or so, beside decode.
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("kill@0", "was killed by SIGKILL"),
        ("kill@5", "was killed by SIGKILL"),
        ("kill@22", "was killed by SIGKILL"),
        ("exit@3", "exited with status 3"),
        ("raise@2", "raised ValueError: injected"),
    ],
)
def test_a_broken_rank_is_replaced_and_the_text_is_the_same(
    make: Make, fault: str, reason: str, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(fault, rank=rank, max_batched_tokens=16)
    found = assert_undisturbed(engine)
    info = engine.info()
    assert (info.generation, info.restarts) == (2, 1)
    assert max(completion.generation for completion in found.values()) == 2
    (message,) = faults_of(caplog)
    assert message.startswith(f"rank {rank} {reason}")
    assert f"(step {fault.partition('@')[2]})" in message


def test_a_kill_from_outside_is_noticed_at_once(make: Make) -> None:
    engine = make(max_model_len=4096, kv_blocks=2048)
    requests = [make_request(n, range(20 + n, 40), max_tokens=200) for n in range(4)]
    answers = Answers()
    engine.submit(requests, answers.sink)
    keys = [request.key for request in requests]
    assert_soon(lambda: sum(engine.progress(keys).values()) > 40)
    os.kill(engine.info().rank_pids[1], signal.SIGKILL)
    found = answers.take(4)
    assert engine.info().generation == 2
    for request in requests:
        assert found[request.key.index].token_ids == wanted(request)


@pytest.mark.parametrize("fault", ["stop@4", "hang@4"])
def test_a_late_rank_is_replaced_at_its_deadline(
    make: Make, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(fault, step_timeout_secs=1.0)
    pids = engine.info().rank_pids
    assert_undisturbed(engine)
    (message,) = faults_of(caplog)
    reason = "is stopped (SIGSTOP)" if fault == "stop@4" else "did not answer within 1 s"
    assert message.startswith(f"rank 1 {reason} (step 4)")
    assert not any(alive(pid) for pid in pids)


def test_a_rank_killed_while_idle_is_replaced_before_work_comes(make: Make) -> None:
    engine = make()
    assert_undisturbed(engine, 2)
    os.kill(engine.info().rank_pids[1], signal.SIGKILL)
    assert_soon(lambda: engine.info().generation == 2)
    assert_undisturbed(engine)
    assert engine.info().generation == 2


def test_many_faults_with_progress_between_them_fail_nobody(make: Make) -> None:
    faults = [f"kill@{step}" for step in (3, 6, 9, 12, 15)]
    engine = make(*faults, generations=9)
    assert_undisturbed(engine)
    assert engine.info().generation == 6


def test_a_poison_request_fails_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(f"kill@token:{POISON}", generations=99)
    poison = make_request(99, [30, POISON])
    requests = some_requests(5)
    found = generate(engine, [*requests[:2], poison, *requests[2:]])
    failure = found[99].failure
    assert failure is not None
    assert (failure.code, found[99].finish_reason) == ("engine_fault", FinishReason.ERROR)
    for request in requests:
        assert found[request.key.index].token_ids == wanted(request)
    assert engine.info().restarts == 3
    assert len(faults_of(caplog)) == 3


def test_a_poison_token_keeps_the_tokens_before_it(make: Make) -> None:
    request = make_request(0, [20, 21, 22])
    fifth = wanted(request)[4]
    engine = make(f"raise@token:{fifth}", generations=99)
    completion = generate(engine, [request])[0]
    assert completion.failure is not None
    assert completion.token_ids == wanted(request)[:5]


def test_requests_that_only_fault_together_all_finish(make: Make) -> None:
    engine = make(f"kill@token:{POISON}/2", generations=99)
    requests = [make_request(n, [30 + n, POISON]) for n in range(3)]
    found = generate(engine, requests)
    for request in requests:
        assert found[request.key.index].token_ids == wanted(request)
    assert engine.info().restarts == 2


def test_gives_up_after_too_many_restarts(make: Make) -> None:
    engine = make("kill@token:20", generations=99, max_restarts=1, max_attempts=9)
    answers = Answers()
    engine.submit(some_requests(1), answers.sink)
    assert_soon(lambda: engine.failure() is not None)
    failure = engine.failure()
    assert isinstance(failure, EngineError)
    assert "restarted 1 times" in str(failure)
    assert "rank 1 was killed by SIGKILL" in str(failure)
    assert not engine.info().ready
    with pytest.raises(GroupStoppedError, match="given up"):
        engine.submit(some_requests(1), answers.sink)
    engine.stop(DEADLINE_SECS)
    assert answers.queue.empty()


def test_a_fault_while_a_later_generation_starts_is_one_more_restart(make: Make) -> None:
    engine = make(generations=1)
    os.kill(engine.info().rank_pids[0], signal.SIGKILL)
    seen = engine.info().rank_pids
    assert_soon(lambda: engine.info().rank_pids not in ((), seen))
    assert_undisturbed(engine)


@pytest.mark.parametrize(
    ("fault", "reason", "budget_secs"),
    [
        ("exit@start", "exited with status 3", DEADLINE_SECS),
        ("kill@start", "was killed by SIGKILL", DEADLINE_SECS),
        ("stop@start", "is stopped", 2.0),
        ("hang@start", "did not answer within 2 s", 2.0),
    ],
)
def test_a_group_that_does_not_come_up_says_why(
    make: Make, fault: str, reason: str, budget_secs: float
) -> None:
    engine = make(fault, start=False, startup_timeout_secs=budget_secs)
    with pytest.raises(GroupStartError, match="rank 1 ") as raised:
        engine.start()
    assert reason in str(raised.value)
    assert engine.failure() is raised.value


def test_a_bad_checkpoint_is_named_and_not_tried_again(make: Make) -> None:
    engine = make("refuse@start", generations=99, start=False)
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv is missing"):
        engine.start()
    assert engine.info().generation == 1


def test_a_permanent_fault_in_a_step_ends_the_engine(make: Make) -> None:
    engine = make("refuse@2", generations=99)
    engine.submit(some_requests(2), Answers().sink)
    assert_soon(lambda: engine.failure() is not None)
    assert isinstance(engine.failure(), CheckpointError)


def test_what_a_rank_prints_is_in_the_fault(tmp_path: Path) -> None:
    code = "import sys; print('no such device', file=sys.stderr); sys.exit(7)"
    engine = Supervisor(engine_settings(tmp_path), rank_command=[sys.executable, "-c", code])
    with pytest.raises(GroupStartError, match=r"(?s)rank 0 exited with status 7.*no such device"):
        engine.start()


def test_requests_that_cannot_run_fail_alone(make: Make) -> None:
    engine = make(kv_blocks=8, max_model_len=64)
    requests = [
        make_request(0, range(20, 25)),
        make_request(1, range(20, 52)),
        make_request(2, range(20, 84)),
        make_request(3, []),
        make_request(4, [20, 512]),
        make_request(5, "\ud800"),
        make_request(6, range(20, 51)),
    ]
    found = generate(engine, requests)
    codes = {n: c.failure.code if c.failure else None for n, c in found.items()}
    assert codes == {
        0: None,
        1: "kv_cache_too_small",
        2: "prompt_too_long",
        3: "empty_prompt",
        4: "invalid_prompt",
        5: "invalid_prompt",
        6: None,
    }
    assert len(found[6].token_ids) == 1


def test_bad_logits_fail_their_row_and_keep_its_tokens(make: Make) -> None:
    requests = some_requests(4)
    third = wanted(requests[0])[2]
    engine = make(f"bad@token:{third}", f"bad@token:{POISON}", rank=0)
    others = [r for r in requests[1:] if third not in (*r.prompt, *wanted(r))]
    found = generate(engine, [requests[0], make_request(9, [POISON]), *others])
    for index, kept in ((0, wanted(requests[0])[:3]), (9, ())):
        failure = found[index].failure
        assert failure is not None
        assert failure.code == "nonfinite_logits"
        assert found[index].token_ids == kept
    assert others
    for request in others:
        assert found[request.key.index].token_ids == wanted(request)
    assert engine.info().generation == 1


def test_max_tokens_ends_at_the_context(make: Make) -> None:
    engine = make(max_model_len=20)
    found = generate(engine, [make_request(0, range(20, 25), max_tokens=10**9)])
    assert found[0].finish_reason is FinishReason.LENGTH
    assert found[0].token_ids == expected_ids(range(20, 25), 15)


def test_seeds_are_the_requests_own_or_from_its_name(make: Make) -> None:
    own = make_request(0, range(20, 25), temperature=1.0, seed=11)
    named = make_request(1, range(20, 25), temperature=1.0)
    other = make_request(2, range(20, 25), temperature=1.0)
    found = generate(make("kill@6"), [own, named, other])
    assert found[0].token_ids == wanted(own, 11)
    assert found[1].token_ids == wanted(named, seed_of(named))
    assert found[1].token_ids != found[2].token_ids


def test_a_sequence_over_many_generations_has_a_stop_string_cut(make: Make) -> None:
    request = make_request(0, range(20, 25), max_tokens=20)
    whole = generate(make(), [request])[0]
    stop = whole.text[10:13]
    engine = make(*(f"kill@{step}" for step in range(2, 12, 3)), generations=9)
    completion = generate(engine, [make_request(0, range(20, 25), max_tokens=20, stop=(stop,))])[0]
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.finish_reason is FinishReason.STOP
    assert engine.info().generation > 1


def test_stop_does_not_wait_for_a_hung_step(make: Make) -> None:
    engine = make("hang@1")
    pids = engine.info().rank_pids
    answers = Answers()
    request = make_request(0, range(20, 25))
    engine.submit([request], answers.sink)
    assert_soon(lambda: engine.progress([request.key]).get(request.key, 0) == 1)
    started = time.monotonic()
    engine.stop(0.0)
    assert time.monotonic() - started < 10.0
    assert not any(alive(pid) for pid in pids)
    assert answers.queue.empty()


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from engine_rig import engine_settings, fake_ranks
from batchtp.worker.supervisor import Supervisor
engine = Supervisor(engine_settings(Path(sys.argv[2]), tp=2), rank_command=fake_ranks())
engine.start()
print(*engine.info().rank_pids, flush=True)
sys.stdin.read()
"""


def test_ranks_die_with_their_supervisor_even_stopped_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parents[1]), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        parent.kill()
        parent.wait(DEADLINE_SECS)
    assert_soon(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
