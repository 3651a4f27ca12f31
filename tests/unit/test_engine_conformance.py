"""What every Engine must do: run on the fake one and on the supervisor over fake ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import DEADLINE_SECS, Answers, engine_settings, fake_ranks, make_request

from batchtp.core import Completion, FinishReason, RequestKey
from batchtp.errors import GroupStoppedError
from batchtp.testing.fake_engine import FakeEngine
from batchtp.worker.engine import Engine
from batchtp.worker.supervisor import Supervisor

PROMPT = tuple(range(60, 90))


@pytest.fixture(params=["fake", "supervisor"])
def idle_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine: Engine = FakeEngine()
    if request.param == "supervisor":
        settings = engine_settings(tmp_path, max_model_len=4096, kv_blocks=2048)
        engine = Supervisor(settings, rank_command=fake_ranks())
    yield engine
    engine.stop(0.0)


@pytest.fixture
def engine(idle_engine: Engine) -> Engine:
    idle_engine.start()
    return idle_engine


def answer(engine: Engine, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Completion:
    answers = Answers()
    engine.submit([make_request(0, prompt, **sampling)], answers.sink)
    return answers.take(1)[0]


def begin(engine: Engine, answers: Answers, index: int = 0) -> RequestKey:
    """A request that has some tokens and is far from its end."""
    if isinstance(engine, FakeEngine):
        engine.hold()
    request = make_request(index, PROMPT, max_tokens=None)
    engine.submit([request], answers.sink)
    if isinstance(engine, FakeEngine):
        engine.advance(3)
    deadline = time.monotonic() + DEADLINE_SECS
    while engine.progress([request.key]).get(request.key, 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return request.key


def resume(engine: Engine) -> None:
    if isinstance(engine, FakeEngine):
        engine.release()


def test_each_request_is_answered_once(engine: Engine) -> None:
    answers = Answers()
    engine.submit([make_request(n, PROMPT[n:]) for n in range(8)], answers.sink)
    engine.submit([make_request(n, PROMPT[n:]) for n in range(8, 16)], answers.sink)
    found = answers.take(16)
    assert set(found) == set(range(16))
    for completion in found.values():
        assert completion.failure is None
        assert completion.prompt_tokens == len(PROMPT) - completion.key.index
        assert completion.generation == 1


def test_the_same_request_gets_the_same_answer(engine: Engine) -> None:
    assert answer(engine) == answer(engine)


def test_max_tokens_is_a_length(engine: Engine) -> None:
    for count in (1, 7):
        completion = answer(engine, max_tokens=count)
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == count


def test_a_stop_string_is_cut_off(engine: Engine) -> None:
    whole = answer(engine, max_tokens=30)
    stop = whole.text[9:12]
    completion = answer(engine, max_tokens=30, stop=("never there", stop))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(whole.token_ids)


def test_a_stop_token_ends_it_and_is_not_in_the_text(engine: Engine) -> None:
    whole = answer(engine, max_tokens=30)
    token = whole.token_ids[9]
    end = whole.token_ids.index(token) + 1
    completion = answer(engine, max_tokens=30, stop_token_ids=(token,))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == whole.token_ids[:end]
    assert whole.text.startswith(completion.text)
    assert completion.text == answer(engine, max_tokens=end - 1).text


def test_what_cannot_run_fails_alone(engine: Engine) -> None:
    answers = Answers()
    long = (60,) * engine.info().max_model_len
    requests = [make_request(0, ""), make_request(1, long), make_request(2, PROMPT)]
    engine.submit(requests, answers.sink)
    found = answers.take(3)
    codes = {n: c.failure.code if c.failure else None for n, c in found.items()}
    assert codes == {0: "empty_prompt", 1: "prompt_too_long", 2: None}
    assert found[0].finish_reason is found[1].finish_reason is FinishReason.ERROR


def test_nothing_to_submit_is_nothing_to_answer(engine: Engine) -> None:
    answers = Answers()
    engine.submit([], answers.sink)
    engine.cancel([])
    assert answers.queue.empty()


def test_cancel_keeps_the_tokens_there_are(engine: Engine) -> None:
    answers = Answers()
    key = begin(engine, answers)
    engine.cancel([key, RequestKey("unknown", 9)])
    completion = answers.take(1)[0]
    assert completion.finish_reason is FinishReason.CANCELLED
    assert len(completion.token_ids) >= 3
    assert completion.text
    assert engine.progress([key]) == {}
    engine.cancel([key])
    assert answers.queue.empty()


def test_cancel_does_not_touch_a_later_request_of_the_same_name(engine: Engine) -> None:
    cancelled, later = Answers(), Answers()
    key = begin(engine, cancelled)
    engine.cancel([key])
    engine.submit([make_request(key.index, PROMPT)], later.sink)
    resume(engine)
    assert cancelled.take(1)[0].finish_reason is FinishReason.CANCELLED
    assert later.take(1)[0].finish_reason is not FinishReason.CANCELLED


def test_progress_is_of_the_unfinished(engine: Engine) -> None:
    answers = Answers()
    assert answer(engine).key.index == 0
    key = begin(engine, answers, index=5)
    assert set(engine.progress([RequestKey("b", 0), key])) == {key}


def test_a_working_engine_says_so(engine: Engine) -> None:
    assert engine.failure() is None
    info = engine.info()
    assert info.ready
    assert (info.generation, info.restarts) == (1, 0)


def test_no_work_before_the_start(idle_engine: Engine) -> None:
    with pytest.raises(GroupStoppedError):
        idle_engine.submit([make_request(0, PROMPT)], Answers().sink)


def test_no_work_after_the_stop(engine: Engine) -> None:
    engine.stop(0.0)
    assert not engine.info().ready
    assert engine.failure() is None
    with pytest.raises(GroupStoppedError):
        engine.submit([make_request(0, PROMPT)], Answers().sink)


def test_stop_lets_running_requests_finish_within_the_grace(engine: Engine) -> None:
    answers = Answers()
    engine.submit([make_request(n, PROMPT[n:]) for n in range(8)], answers.sink)
    engine.stop(DEADLINE_SECS)
    assert set(answers.take(8)) == set(range(8))


def test_stop_without_grace_gives_no_completion(engine: Engine) -> None:
    answers = Answers()
    begin(engine, answers)
    engine.stop(0.0)
    assert answers.queue.empty()
