"""A TP group whose ranks are threads of one process: the real decoder and shards, no transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from batchtp.model.config import load_config
from batchtp.model.decoder import Decoder
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan
from batchtp.worker.cache import make_cache, usable_cores
from batchtp.worker.messages import Plan, Slice
from batchtp.worker.runner import Runner

T = TypeVar("T")
# Far above what the slowest layer of a test takes.
WAIT_SECS = 600


class Meeting:
    """Where the threads of a group exchange their tensors."""

    def __init__(self, size: int) -> None:
        """`size` threads take part in every exchange."""
        self.size = size
        self._barrier = threading.Barrier(size, timeout=WAIT_SECS)
        self._offered: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's x, by rank."""
        self._offered[rank] = x
        self._barrier.wait()
        parts = [part for part in self._offered if part is not None]
        self._barrier.wait()
        return parts

    def abort(self) -> None:
        """Let nobody wait for a thread that failed."""
        self._barrier.abort()


class ThreadRank:
    """One thread's view of the meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size = meeting.size
        self._meeting = meeting
        self._rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """See worker.comm.Group."""
        parts = self._meeting.exchange(self._rank, x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See worker.comm.Group."""
        parts = self._meeting.exchange(self._rank, x)
        assert [part.shape[1] for part in parts] == list(widths)
        return None if self._rank else torch.cat(parts, dim=1)


class ThreadedRunners:
    """A loaded model at a TP degree, to be stepped as one. Its caches start as NaN."""

    def __init__(
        self,
        model: Path,
        tp: int,
        *,
        blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 256,
        device: str = "cpu",
        block_size: int = 16,
    ) -> None:
        # The ranks are threads already; more of them would only get in each other's way.
        torch.set_num_threads(max(1, usable_cores() // tp))
        config = load_config(model)
        shards = [ShardPlan.make(config, tp, rank) for rank in range(tp)]
        self._meeting = Meeting(tp)
        self.decoders: list[Decoder] = []
        self.runners: list[Runner] = []
        for rank in range(tp):
            tensors = load_shard(model, config, shards[rank], dtype, torch.device(device))
            decoder = Decoder(
                config,
                shards,
                rank,
                tensors,
                ThreadRank(self._meeting, rank),
                max_model_len=max_model_len,
            )
            assert not tensors, f"loaded but not used: {sorted(tensors)}"
            cache = make_cache(decoder, blocks, block_size)
            for layer in cache:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
            self.decoders.append(decoder)
            self.runners.append(Runner(decoder, cache, block_size))

    def step(self, slices: tuple[Slice, ...]) -> dict[int, int]:
        """Run a plan; the tokens that rank 0 drew."""
        drawn = self._on_all(lambda runner: runner.step(Plan(1, 1, slices)))
        assert not drawn[0].bad
        assert all(not other.tokens for other in drawn[1:])
        return dict(drawn[0].tokens)

    def logits(self, slices: tuple[Slice, ...], *, everywhere: bool = False) -> Tensor:
        """Logits of the slices' last tokens, or of every token: float32 [R, vocabulary]."""
        logits = self._on_all(lambda runner: runner.logits(Plan(1, 1, slices), everywhere))
        assert logits[0] is not None
        assert all(other is None for other in logits[1:])
        return logits[0]

    def _on_all(self, call: Callable[[Runner], T]) -> list[T]:
        def guarded(runner: Runner) -> T:
            try:
                return call(runner)
            except BaseException:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(len(self.runners)) as pool:
            return list(pool.map(guarded, self.runners))
