"""A rank without a model: `python -m batchtp.testing.fake_rank --fd N [--fault KIND@STEP …]`

Speaks the rank protocol (worker.messages). The token drawn for a sequence depends on all the ids
it was shown before and on nothing else, so a replay, another batch or another chunking changes
nothing; and it is computed from what the *cache* was given, so a hole there shows in the text.

Faults, in generation 1 only unless `--every-generation`: `exit@S`, `kill@S`, `stop@S`, `raise@S` at
step S (S may be `start`), `poison@T` whenever token id T is computed. `--rank R` names the culprit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import sys

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

VOCAB_SIZE = 1000


class FakeRank:
    """Keeps a cache of token ids in place of keys and values."""

    def __init__(self, sock: socket.socket, arguments: argparse.Namespace) -> None:
        self._sock = sock
        self._arguments = arguments
        self._cache: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        hello = receive(self._sock)
        assert isinstance(hello, Hello)
        self._hello = hello
        self._maybe_fault("start", ())
        blocks = hello.config.kv_blocks or 64
        length = hello.config.max_model_len or 256
        send(self._sock, Ready(hello.rank, hello.generation, blocks, length, VOCAB_SIZE, 0, 0.0))
        assert isinstance(receive(self._sock), StartCache)
        while isinstance(plan := receive(self._sock), Plan):
            ids = [token for part in plan.slices for token in part.token_ids]
            self._maybe_fault(str(plan.step), ids)
            tokens = tuple((s.sequence_id, self._next(s)) for s in plan.slices if self._fill(s))
            send(self._sock, StepResult(hello.rank, plan.generation, plan.step, tokens, (), 0.0))

    def _fill(self, part: Slice) -> bool:
        size = self._hello.config.block_size
        for offset, token in enumerate(part.token_ids, part.start):
            self._cache[part.blocks[offset // size] * size + offset % size] = token
        return part.sample

    def _next(self, part: Slice) -> int:
        size = self._hello.config.block_size
        seen = [
            self._cache[part.blocks[at // size] * size + at % size]
            for at in range(part.start + len(part.token_ids))
        ]
        return next_token(seen, part.seed if part.temperature > 0 else 0)

    def _maybe_fault(self, step: str, ids: tuple[int, ...] | list[int]) -> None:
        arguments, hello = self._arguments, self._hello
        if hello.rank != arguments.rank:
            return
        if hello.generation > 1 and not arguments.every_generation:
            return
        for fault in arguments.fault:
            kind, _, when = fault.partition("@")
            if kind == "poison" and int(when) in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if when == step:
                self._fault(kind)

    def _fault(self, kind: str) -> None:
        if kind == "exit":
            os._exit(3)
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "raise":
            hello = self._hello
            send(
                self._sock,
                RankFault(
                    hello.rank, hello.generation, "step", "ValueError", "injected", "", False
                ),
            )
            os._exit(1)


def next_token(seen: list[int], seed: int) -> int:
    """The token after these: 2..VOCAB_SIZE-1, so that 0 and 1 can mean something to a test."""
    digest = hashlib.blake2b(repr((seen, seed)).encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 2)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m batchtp.testing.fake_rank")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--every-generation", action="store_true")
    arguments = parser.parse_args()
    try:
        FakeRank(socket.socket(fileno=arguments.fd), arguments).run()
    except (EOFError, ConnectionError):
        sys.exit(0)


if __name__ == "__main__":
    main()
