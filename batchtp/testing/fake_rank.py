"""A rank without a model: `python -m batchtp.testing.fake_rank --fd N [--fault KIND@WHEN …]`

Speaks the rank protocol (worker.messages). The token drawn for a sequence depends on all the ids
before it and on nothing else, so a replay, another batch or another chunking changes nothing; and
it is computed from what the *cache* was given, so a hole there shows in the text.

KIND  kill (SIGKILL), stop (SIGSTOP), exit (status 3), raise, refuse (a permanent fault), hang,
      bad (the sequence's logits are not finite)
WHEN  start, a step's number, token:ID (whenever that id is computed), or token:ID/N (when it is
      computed in a step of N sequences or more)

Faults strike rank `--rank` in the first `--generations` generations.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Sequence

from batchtp.worker.messages import (
    Hello,
    Plan,
    RankFault,
    Ready,
    Slice,
    StartCache,
    StepResult,
    receive,
    send,
)
from batchtp.worker.rank import die_with_parent

VOCAB_SIZE = 512
# Ids below are never drawn: a test can mean something by them.
FIRST_DRAWN = 10


class FakeRank:
    """Keeps a cache of token ids in place of keys and values."""

    def __init__(self, sock: socket.socket, arguments: argparse.Namespace) -> None:
        self._sock = sock
        self._arguments = arguments
        self._phase = "start"
        self._cache: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        hello = receive(self._sock)
        assert isinstance(hello, Hello)
        self._hello = hello
        self._maybe_fault("start")
        blocks = hello.config.kv_blocks or 64
        length = hello.config.max_model_len or 256
        send(self._sock, Ready(hello.rank, hello.generation, blocks, length, VOCAB_SIZE, 0, 0.0))
        assert isinstance(receive(self._sock), StartCache)
        self._phase = "step"
        while isinstance(plan := receive(self._sock), Plan):
            self._maybe_fault(str(plan.step))
            for part in plan.slices:
                for token in set(part.token_ids):
                    self._maybe_fault(f"token:{token}", len(plan.slices))
            send(self._sock, self._step(plan))

    def _step(self, plan: Plan) -> StepResult:
        for part in plan.slices:
            self._fill(part)
        wanted = [part for part in plan.slices if part.sample]
        bad = [part.sequence_id for part in wanted if self._is_bad(part)]
        tokens = [(s.sequence_id, self._draw(s)) for s in wanted if s.sequence_id not in bad]
        if self._hello.rank:
            bad, tokens = [], []
        rank = self._hello.rank
        return StepResult(rank, plan.generation, plan.step, tuple(tokens), tuple(bad), 0.0)

    def _slots(self, part: Slice, positions: range) -> list[int]:
        size = self._hello.config.block_size
        return [part.blocks[at // size] * size + at % size for at in positions]

    def _fill(self, part: Slice) -> None:
        positions = range(part.start, part.start + len(part.token_ids))
        self._cache.update(zip(self._slots(part, positions), part.token_ids, strict=True))

    def _seen(self, part: Slice) -> list[int]:
        slots = self._slots(part, range(part.start + len(part.token_ids)))
        return [self._cache[slot] for slot in slots]

    def _draw(self, part: Slice) -> int:
        return next_token(self._seen(part), part.seed if part.temperature > 0 else 0)

    def _is_bad(self, part: Slice) -> bool:
        return any(f"bad@token:{token}" in self._arguments.fault for token in self._seen(part))

    def _maybe_fault(self, moment: str, members: int = 0) -> None:
        arguments, hello = self._arguments, self._hello
        if hello.rank != arguments.rank or hello.generation > arguments.generations:
            return
        for fault in arguments.fault:
            kind, _, when = fault.partition("@")
            when, _, least = when.partition("/")
            if when == moment and members >= int(least or 0):
                self._fault(kind)

    def _fault(self, kind: str) -> None:
        if kind == "exit":
            os._exit(3)
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "hang":
            threading.Event().wait()
        if kind == "raise":
            self._say("ValueError", "injected", permanent=False)
        if kind == "refuse":
            self._say("CheckpointError", "layers.0.qkv is missing", permanent=True)

    def _say(self, kind: str, message: str, *, permanent: bool) -> None:
        hello = self._hello
        word = RankFault(
            rank=hello.rank,
            generation=hello.generation,
            phase=self._phase,
            kind=kind,
            message=message,
            traceback=f"Traceback: {kind}: {message}",
            permanent=permanent,
        )
        send(self._sock, word)
        os._exit(1)


def next_token(seen: Sequence[int], seed: int) -> int:
    """The token after these ids."""
    digest = hashlib.blake2b(repr((list(seen), seed)).encode(), digest_size=8).digest()
    return FIRST_DRAWN + int.from_bytes(digest, "little") % (VOCAB_SIZE - FIRST_DRAWN)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m batchtp.testing.fake_rank")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--generations", type=int, default=1)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    try:
        FakeRank(socket.socket(fileno=arguments.fd), arguments).run()
    except (EOFError, ConnectionError):
        os._exit(0)


if __name__ == "__main__":
    main()
