"""A supervisor over fake ranks, requests for it, and what it must answer."""

from __future__ import annotations

import queue
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchtp.core import Completion, Endpoint, GenerationRequest, RequestKey, SamplingParams
from batchtp.settings import Settings, load_settings
from batchtp.testing.fake_rank import next_token

# Its tokenizer and config are real; fake ranks read no weights.
MODEL = Path(__file__).parent / "data" / "checkpoints" / "awq-g64"
DEADLINE_SECS = 60.0


def engine_settings(home: Path, **flags: Any) -> Settings:
    values: dict[str, Any] = {
        "home": str(home),
        "model": str(MODEL),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "kv_blocks": 64,
        "block_size": 4,
        "startup_timeout_secs": DEADLINE_SECS,
        "step_timeout_secs": DEADLINE_SECS,
    }
    return load_settings(values | flags, environ={})


def fake_ranks(*faults: str, rank: int = 0, generations: int = 1) -> tuple[str, ...]:
    command = [sys.executable, "-m", "batchtp.testing.fake_rank", "--rank", str(rank)]
    command += ["--generations", str(generations)]
    for fault in faults:
        command += ["--fault", fault]
    return tuple(command)


def make_request(
    index: int, prompt: Sequence[int] | str, *, batch: str = "b", **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | sampling))
    return GenerationRequest(
        key=RequestKey(batch, index),
        custom_id=str(index),
        endpoint=Endpoint.COMPLETION,
        sampling=params,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
    )


def expected_ids(prompt: Sequence[int], count: int, seed: int = 0) -> tuple[int, ...]:
    """What fake ranks draw after the prompt, undisturbed."""
    seen = list(prompt)
    for _ in range(count):
        seen.append(next_token(seen, seed))
    return tuple(seen[len(prompt) :])


class Answers:
    """A sink that can be waited on."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.sink = self.queue.put

    def take(self, count: int) -> dict[int, Completion]:
        """So many completions, by the index of their request."""
        found: dict[int, Completion] = {}
        for _ in range(count):
            completion = self.queue.get(timeout=DEADLINE_SECS)
            assert completion.key.index not in found, "a request was answered twice"
            found[completion.key.index] = completion
        assert self.queue.empty()
        return found
