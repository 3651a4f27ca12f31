"""One generation of the TP group: its ranks, and every wait on them.

A group is never repaired: any fault raises `GroupFaultError`, and the caller kills the group and
makes the next generation. `torch.distributed` is never asked to tear anything down.
"""

from __future__ import annotations

import contextlib
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from batchtp.errors import EngineError
from batchtp.worker.diagnosis import Evidence, GroupFaultError, Moment, diagnose, late
from batchtp.worker.engine import OnLoading, ignore_loading
from batchtp.worker.meeting import MeetingPlace
from batchtp.worker.messages import (
    FromRank,
    GroupConfig,
    Hello,
    Loading,
    Plan,
    RankFault,
    Ready,
    StartCache,
    StepResult,
    ToRank,
    encode,
)
from batchtp.worker.rank_process import RankProcess
from batchtp.worker.wakeup import Wakeup

RANK_COMMAND = (sys.executable, "-m", "batchtp.worker.rank")
# Neighbours of a dead rank notice within 40 ms; for so long a better culprit may turn up.
_SETTLE_SECS = 0.1
# A killed process is reaped at once unless the kernel is stuck in it (a driver call).
_REAP_SECS = 10.0
# How soon a wait sees that it was interrupted.
_POLL_SECS = 0.25

_Answer = TypeVar("_Answer", Ready, StepResult)


class Interrupted(Exception):  # noqa: N818 - not an error: the caller asked for it
    """The caller's `interrupted` callback said to stop waiting."""


class Loaded:
    """How far the ranks have loaded; `tell` hears of the slowest one's share, 0 to 1."""

    def __init__(self, tp: int, tell: OnLoading) -> None:
        self._done = [0.0] * tp
        self._tell = tell

    def without(self, messages: Sequence[FromRank]) -> list[FromRank]:
        """Take in the news of loading; the other messages."""
        news = [message for message in messages if isinstance(message, Loading)]
        for message in news:
            self._done[message.rank] = message.done
        if news:
            self._tell(min(self._done))
        return [message for message in messages if not isinstance(message, Loading)]


class RankGroup:
    """`config.tp` rank processes of one generation. A context manager: leaving kills them.

    `interrupted` is asked during every wait for ranks; once it is true, `Interrupted` is raised.
    `on_loading` is told what share of the weights every rank has, again and again.
    """

    def __init__(
        self,
        config: GroupConfig,
        generation: int,
        command: Sequence[str] = RANK_COMMAND,
        interrupted: Callable[[], bool] = lambda: False,
        on_loading: OnLoading = ignore_loading,
    ) -> None:
        self.generation = generation
        self._loading = Loaded(config.tp, on_loading)
        self._config = config
        self._interrupted = interrupted
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._moment = Moment("start")
        self._meeting = MeetingPlace()
        try:
            for number in range(config.tp):
                self._spawn(number, command)
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
        return tuple(rank.pid for rank in self._ranks)

    def start(self, timeout_secs: float) -> tuple[Ready, int]:
        """Bring every rank up and allocate the cache; rank 0's Ready, and the blocks there are.

        Raises GroupFaultError when a rank dies or is late, Interrupted.
        """
        deadline = time.monotonic() + timeout_secs
        for rank in self._ranks:
            hello = Hello(self._config, rank.number, self.generation, self._meeting.rendezvous)
            self._send([rank], hello, deadline)
        answers = self._gather(Ready, deadline, timeout_secs)
        blocks = min(ready.kv_blocks for ready in answers)
        self._send(self._ranks, StartCache(blocks), deadline)
        return answers[0], blocks

    def step(self, plan: Plan, timeout_secs: float) -> StepResult:
        """Run one plan on every rank; rank 0's result. Raises GroupFaultError, Interrupted."""
        self._moment = Moment("step", plan.step)
        deadline = time.monotonic() + timeout_secs
        self._send(self._ranks, plan, deadline)
        results = self._gather(StepResult, deadline, timeout_secs)
        for result in results:
            if (result.generation, result.step) != (plan.generation, plan.step):
                self._refuse(result.rank, f"generation {result.generation} step {result.step}")
        drawn = sorted([*dict(results[0].tokens), *results[0].bad])
        if drawn != sorted(part.sequence_id for part in plan.slices if part.sample):
            self._refuse(0, f"sequences {drawn}")
        self._moment = Moment("idle")
        return results[0]

    def idle(self, wakeup: Wakeup) -> None:
        """Wait until `wakeup` is set. Raises GroupFaultError when a rank ends meanwhile."""
        self._selector.register(wakeup, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        return
                    self._on_event(key)
        finally:
            # Gone already when a fault was looked into.
            with contextlib.suppress(KeyError):
                self._selector.unregister(wakeup)

    def kill(self) -> None:
        """SIGKILL every rank, reap them, drop what the generation left on disk. Idempotent.

        Raises EngineError when the kernel does not let a rank go.
        """
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        stuck = [rank.pid for rank in ranks if not rank.reap(_REAP_SECS)]
        for rank in ranks:
            rank.close()
        self._selector.close()
        self._meeting.close()
        if stuck:
            raise EngineError(
                f"Rank process {stuck[0]} does not die of SIGKILL: the kernel holds it, most "
                "likely in a device driver. Check the device; the machine may need a restart."
            )

    def _spawn(self, number: int, command: Sequence[str]) -> None:
        rank = RankProcess(number, command)
        self._ranks.append(rank)
        for descriptor in (rank.sock.fileno(), rank.pidfd, rank.output):
            self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _send(self, ranks: Sequence[RankProcess], message: ToRank, deadline: float) -> None:
        frame = encode(message)
        for rank in ranks:
            try:
                rank.write(frame, max(deadline - time.monotonic(), _POLL_SECS))
            except TimeoutError:
                raise self._broken(rank, "did not take its message in time") from None
            except OSError as error:
                raise self._broken(rank, f"closed its socket ({error})") from None

    def _gather(self, kind: type[_Answer], deadline: float, timeout_secs: float) -> list[_Answer]:
        """One message of this kind from every rank, by rank."""
        answers: dict[int, _Answer] = {}
        while len(answers) < len(self._ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                silent = [r.evidence() for r in self._ranks if r.number not in answers]
                raise late(silent, self._moment, timeout_secs)
            if self._interrupted():
                raise Interrupted
            for key, _ in self._selector.select(min(left, _POLL_SECS)):
                for message in self._on_event(key):
                    if not isinstance(message, kind):
                        self._refuse(key.data.number, type(message).__name__)
                    answers[key.data.number] = message
        return [answers[rank.number] for rank in self._ranks]

    def _on_event(self, key: selectors.SelectorKey) -> list[FromRank]:
        """Messages that came in. Raises GroupFaultError at an exit or a rank's last word."""
        rank: RankProcess = key.data
        if key.fd == rank.pidfd:
            raise self._broken(rank, "exited")
        if key.fd == rank.output:
            if not rank.read_output():
                self._selector.unregister(key.fd)
            return []
        messages = rank.read()
        if messages is None:
            raise self._broken(rank, "closed its socket")
        if any(isinstance(message, RankFault) for message in messages):
            raise self._broken(rank, "raised")
        return self._loading.without(messages)

    def _broken(self, first: RankProcess, complaint: str) -> GroupFaultError:
        """The fault, once the dust has settled over who broke the group."""
        until = time.monotonic() + _SETTLE_SECS
        while (left := until - time.monotonic()) > 0:
            # A signal is cause enough.
            if (first.evidence().exit_status or 0) < 0:
                break
            for key, _ in self._selector.select(left):
                if not self._hear_out(key):
                    self._selector.unregister(key.fileobj)
        return diagnose(self._seen(), self._moment, first=first.number, complaint=complaint)

    def _hear_out(self, key: selectors.SelectorKey) -> bool:
        """Take in what else a broken group says; False when this descriptor says no more."""
        rank: RankProcess | None = key.data
        if rank is None or key.fd == rank.pidfd:
            return False
        if key.fd == rank.output:
            return rank.read_output()
        return rank.read() is not None

    def _seen(self) -> list[Evidence]:
        return [rank.evidence() for rank in self._ranks]

    def _refuse(self, rank: int, what: str) -> NoReturn:
        """Raise the fault of an answer that nobody asked for."""
        raise GroupFaultError(self._ranks[rank].evidence(), self._moment, f"answered with {what}")
