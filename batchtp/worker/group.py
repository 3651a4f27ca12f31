"""One generation of the TP group: its processes, and every wait on them.

Ranks are exec'd, never forked, each with one socket. The thread that makes a group must outlive it:
ranks ask the kernel to kill them when the thread that started them ends. A group is never repaired:
any fault raises `GroupFaultError`, and the caller kills the group and makes the next generation.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from batchtp.errors import RankFaultError
from batchtp.worker.messages import (
    FrameBuffer,
    FromRank,
    GroupConfig,
    Hello,
    Plan,
    RankFault,
    Ready,
    StartCache,
    StepResult,
    ToRank,
    send,
)

RANK_COMMAND = (sys.executable, "-m", "batchtp.worker.rank")
# Neighbours of a dead rank notice within 40 ms; for so long a better culprit may turn up.
_SETTLE_SECS = 0.1
# How much of a rank's standard error a fault quotes.
_TAIL_BYTES = 4000
# A killed process is reaped at once unless the kernel is stuck in it (a driver call).
_REAP_SECS = 10.0
_POLL_SECS = 0.25

_Answer = TypeVar("_Answer", Ready, StepResult)


class GroupFaultError(RankFaultError):
    """The group is broken: `rank` is the culprit, `phase` where it was, `reason` what it did.

    `permanent` faults come back in every generation (a bad checkpoint, an impossible setting).
    `kind` and `message` are the exception's, where the rank could still tell.
    """

    def __init__(
        self,
        rank: int,
        phase: str,
        reason: str,
        *,
        step: int | None = None,
        permanent: bool = False,
        kind: str = "",
        message: str = "",
        detail: str = "",
    ) -> None:
        where = f"{phase}, step {step}" if step is not None else phase
        super().__init__(f"rank {rank} {reason} (in {where})" + (f"\n{detail}" if detail else ""))
        self.rank = rank
        self.phase = phase
        self.reason = reason
        self.step = step
        self.permanent = permanent
        self.kind = kind
        self.message = message


class Interrupted(Exception):  # noqa: N818 - not an error: the caller asked for it
    """The caller's `interrupted` callback said to stop waiting."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    pidfd: int
    log: Path
    inbox: FrameBuffer = field(default_factory=FrameBuffer)


class RankGroup:
    """`tp` rank processes of one generation. Use as a context manager: leaving kills them."""

    def __init__(
        self, config: GroupConfig, generation: int, command: Sequence[str] = RANK_COMMAND
    ) -> None:
        self.generation = generation
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._phase = "start"
        self._step: int | None = None
        # Its own folder a generation: a stale FileStore would let old and new ranks meet.
        self._folder = tempfile.TemporaryDirectory(prefix="batchtp-group-")
        try:
            for number in range(config.tp):
                self._ranks.append(self._spawn(number, command))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(rank.process.pid for rank in self._ranks)

    def start(self, timeout_secs: float, interrupted: Callable[[], bool]) -> tuple[Ready, int]:
        """Bring every rank up and allocate the cache; rank 0's Ready, and the blocks there are.

        Raises GroupFaultError when a rank dies or is late, Interrupted when told to stop.
        """
        deadline = time.monotonic() + timeout_secs
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        for rank in self._ranks:
            hello = Hello(self._config, rank.number, self.generation, rendezvous)
            self._send(rank, hello, deadline)
        answers = self._gather(Ready, deadline, interrupted)
        blocks = min(ready.kv_blocks for ready in answers)
        for rank in self._ranks:
            self._send(rank, StartCache(blocks), deadline)
        return answers[0], blocks

    def step(self, plan: Plan, timeout_secs: float) -> StepResult:
        """Run one plan on every rank; rank 0's result. Raises GroupFaultError."""
        self._phase, self._step = "step", plan.step
        deadline = time.monotonic() + timeout_secs
        for rank in self._ranks:
            self._send(rank, plan, deadline)
        results = self._gather(StepResult, deadline, lambda: False)
        for result in results:
            if (result.generation, result.step) != (plan.generation, plan.step):
                raise self._fault(
                    self._ranks[result.rank],
                    f"answered for generation {result.generation} step {result.step}",
                )
        self._phase = "idle"
        return results[0]

    def idle(self, wake: int) -> None:
        """Wait until the descriptor `wake` is readable. Raises GroupFaultError when a rank ends."""
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj == wake:
                        return
                    self._on_event(key)
        finally:
            if wake in self._selector.get_map():
                self._selector.unregister(wake)

    def kill(self) -> None:
        """SIGKILL every rank, reap them, and drop what the generation left on disk. Idempotent."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait(_REAP_SECS)
            rank.sock.close()
            os.close(rank.pidfd)
        self._ranks = []
        self._selector.close()
        self._folder.cleanup()

    def _spawn(self, number: int, command: Sequence[str]) -> _Rank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log = Path(self._folder.name) / f"rank{number}.log"
        with theirs, log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
        rank = _Rank(number, process, ours, os.pidfd_open(process.pid), log)
        self._selector.register(rank.sock, selectors.EVENT_READ, rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        return rank

    def _send(self, rank: _Rank, message: ToRank, deadline: float) -> None:
        rank.sock.settimeout(max(deadline - time.monotonic(), _POLL_SECS))
        try:
            send(rank.sock, message)
        except TimeoutError:
            raise self._diagnose(rank, "did not take its message in time") from None
        except OSError as error:
            raise self._diagnose(rank, f"closed its socket ({error})") from None

    def _gather(
        self, kind: type[_Answer], deadline: float, interrupted: Callable[[], bool]
    ) -> list[_Answer]:
        """One message of this kind from every rank, by rank."""
        answers: dict[int, _Answer] = {}
        while len(answers) < len(self._ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                late = [rank for rank in self._ranks if rank.number not in answers]
                raise self._late(late)
            if interrupted():
                raise Interrupted
            for key, _ in self._selector.select(min(left, _POLL_SECS)):
                for message in self._on_event(key):
                    if not isinstance(message, kind):
                        raise self._fault(key.data, f"sent {type(message).__name__}, unasked")
                    answers[key.data.number] = message
        return [answers[rank.number] for rank in self._ranks]

    def _on_event(self, key: selectors.SelectorKey) -> list[FromRank]:
        """Messages that came in. Raises GroupFaultError at an exit or a rank's last word."""
        rank: _Rank = key.data
        if key.fileobj == rank.pidfd:
            raise self._diagnose(rank, "exited")
        messages = self._read(rank)
        if messages is None or any(isinstance(m, RankFault) for m in messages):
            raise self._diagnose(rank, "closed its socket", messages or [])
        return messages

    def _read(self, rank: _Rank) -> list[FromRank] | None:
        """What is on the socket now; None at its end."""
        rank.sock.setblocking(False)
        try:
            data = rank.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return rank.inbox.feed(data) if data else None

    def _diagnose(
        self, first: _Rank, reason: str, messages: Sequence[FromRank] = ()
    ) -> GroupFaultError:
        """Who broke the group. A dead rank takes its neighbours along: let the dust settle, then
        blame a rank killed by a signal before one that raised, and that before one that complains.
        """
        words = {m.rank: m for m in messages if isinstance(m, RankFault)}
        until = time.monotonic() + _SETTLE_SECS
        while (left := until - time.monotonic()) > 0:
            if (first.process.poll() or 0) < 0:
                break
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._selector.unregister(key.fileobj)
                    continue
                if key.fileobj == key.data.pidfd:
                    self._selector.unregister(key.fileobj)
                    continue
                heard = self._read(key.data)
                if heard is None:
                    self._selector.unregister(key.fileobj)
                words |= {m.rank: m for m in heard or () if isinstance(m, RankFault)}
        signalled = [r for r in self._ranks if (r.process.poll() or 0) < 0]
        if signalled and not any(word.permanent for word in words.values()):
            culprit = first if first in signalled else signalled[0]
            number = -(culprit.process.returncode or 0)
            return self._fault(culprit, f"was killed by {signal.Signals(number).name}")
        if words:
            return self._raised(words, first)
        if first.process.returncode is not None:
            reason = f"exited with status {first.process.returncode}"
        return self._fault(first, reason)

    def _raised(self, words: dict[int, RankFault], first: _Rank) -> GroupFaultError:
        # A broken collective is what neighbours see; anything else is nearer to the cause.
        roots = [w for w in words.values() if "gloo" not in w.traceback.lower()] or [
            words.get(first.number, next(iter(words.values())))
        ]
        word = roots[0]
        return GroupFaultError(
            word.rank,
            word.phase,
            f"raised {word.kind}: {word.message}",
            step=self._step if word.phase == "step" else None,
            permanent=word.permanent,
            kind=word.kind,
            message=word.message,
            detail=word.traceback,
        )

    def _late(self, late: Sequence[_Rank]) -> GroupFaultError:
        stopped = [rank for rank in late if _is_stopped(rank.process.pid)]
        culprit = (stopped or late)[0]
        reason = "is stopped (SIGSTOP)" if stopped else "did not answer in time"
        others = ", ".join(str(rank.number) for rank in late if rank is not culprit)
        return self._fault(culprit, reason + (f"; nor did rank {others}" if others else ""))

    def _fault(self, rank: _Rank, reason: str) -> GroupFaultError:
        tail = rank.log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return GroupFaultError(rank.number, self._phase, reason, step=self._step, detail=tail)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # The name may hold anything, parentheses too; the state follows its last one.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
