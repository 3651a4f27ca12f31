"""The supervisor over real ranks and a real checkpoint, undisturbed and not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from engine_rig import DEADLINE_SECS, MODEL, Answers, engine_settings, make_request
from model_files import write_hf
from safetensors.torch import load_file, save_file

from batchtp.core import Completion, GenerationRequest, RequestKey
from batchtp.errors import CheckpointError
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


def test_a_rank_that_alone_cannot_load_ends_the_start_for_all(tmp_path: Path) -> None:
    # Only the second rank reads the weight that is not finite; the first loads, and waits for it.
    model = tmp_path / "model"
    write_hf(model, "")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, -1] = torch.inf
    save_file(tensors, model / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model / name)
    settings = engine_settings(tmp_path / "home", model=str(model), tp=2, quantize="int4")
    engine = Supervisor(replace(settings, max_model_len=128))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight holds a NaN"):
        engine.start()
    assert not _living_ranks()


def _living_ranks() -> list[int]:
    """Process ids of ranks that this process started."""
    children = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    return [c.pid for c in children if "batchtp.worker.rank" in c.cmdline()]
