"""The supervisor over real ranks and a real checkpoint, undisturbed and not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import DEADLINE_SECS, MODEL, Answers, engine_settings, make_request

from batchtp.core import Completion, GenerationRequest, RequestKey
from batchtp.worker.supervisor import Supervisor

EXPECTED = json.loads((MODEL / "expected.json").read_text())["prompts"]

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made: list[Supervisor] = []

    def build(**flags: object) -> Supervisor:
        made.append(Supervisor(engine_settings(tmp_path, **flags)))
        made[-1].start()
        return made[-1]

    yield build
    for supervisor in made:
        supervisor.stop(0.0)


def expected_requests(copies: int = 1) -> list[GenerationRequest]:
    """The checkpoint's own prompts; every copy wants the reference's greedy tokens."""
    return [
        make_request(
            copy * len(EXPECTED) + at,
            prompt["ids"],
            max_tokens=len(prompt["greedy_ids"]),
            ignore_eos=True,
        )
        for copy in range(copies)
        for at, prompt in enumerate(EXPECTED)
    ]


def assert_as_expected(found: dict[int, Completion]) -> None:
    for index, completion in found.items():
        assert list(completion.token_ids) == EXPECTED[index % len(EXPECTED)]["greedy_ids"]


def test_a_tiny_pool_and_whole_prompts_give_the_references_tokens(make: Make) -> None:
    engine = make(kv_blocks=16, chunked_prefill=False)
    requests, answers = expected_requests(copies=4), Answers()
    engine.submit(requests, answers.sink)
    assert_as_expected(answers.take(len(requests)))


def test_killed_ranks_change_no_token(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(tp=2, max_batched_tokens=7)
    seeded = make_request(99, EXPECTED[0]["ids"], temperature=0.9, max_tokens=40, seed=7)
    requests, answers = [*expected_requests(copies=2), seeded], Answers()
    engine.submit(requests, answers.sink)
    undisturbed = answers.take(len(requests))
    assert undisturbed[99].generation == 1
    assert_as_expected({index: c for index, c in undisturbed.items() if index != 99})
    engine.submit(requests, answers.sink)
    keys = [request.key for request in requests]
    for rank, tokens in ((0, 12), (1, 60)):
        deadline = time.monotonic() + DEADLINE_SECS
        while not (pids := engine.info().rank_pids) or _generated(engine, keys) < tokens:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(pids[rank], signal.SIGKILL)
    found = answers.take(len(requests))
    assert engine.info().generation == 3
    for index, completion in found.items():
        assert completion.token_ids == undisturbed[index].token_ids
    assert "rank 0 was killed by SIGKILL" in caplog.text
    assert "rank 1 was killed by SIGKILL" in caplog.text


def _generated(engine: Supervisor, keys: list[RequestKey]) -> int:
    return sum(engine.progress(keys).values())
