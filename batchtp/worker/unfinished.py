"""Where callers and the engine's thread meet: every request that has no completion yet."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from batchtp.core import RequestKey
from batchtp.errors import GroupStoppedError
from batchtp.worker.engine import Sink
from batchtp.worker.output import StopWatch
from batchtp.worker.sequence import Sequence
from batchtp.worker.wakeup import Wakeup


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine, and whom to tell. `stop_watch` where there are stop strings."""

    sequence: Sequence
    sink: Sink
    stop_watch: StopWatch | None


class Unfinished:
    """Thread safe. `wakeup` is set when there is something to take."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._new: list[Job] = []
        self._cancelled: list[Job] = []
        self._closed = ""
        self._abandoned = False

    def __getitem__(self, sequence_id: int) -> Job:
        return self._jobs[sequence_id]

    def add(self, jobs: Iterable[Job]) -> None:
        """Take new ones. Raises GroupStoppedError once closed."""
        with self._changed:
            if self._closed:
                raise GroupStoppedError(self._closed)
            added = list(jobs)
            self._new += added
            self._jobs.update((job.sequence.id, job) for job in added)
        self.wakeup.set()

    def cancel(self, keys: Collection[RequestKey]) -> None:
        """Mark those that are here now: a later request of the same name is another one."""
        wanted = set(keys)
        with self._changed:
            self._cancelled += [job for job in self._jobs.values() if job.sequence.key in wanted]
        self.wakeup.set()

    def progress(self, keys: Collection[RequestKey]) -> Mapping[RequestKey, int]:
        """Tokens generated so far."""
        wanted = set(keys)
        with self._changed:
            found = [job.sequence for job in self._jobs.values() if job.sequence.key in wanted]
        return {sequence.key: len(sequence.output_ids) for sequence in found}

    def take(self) -> tuple[list[Job], list[Job]]:
        """What came since the last time: new ones, and unfinished ones to cancel."""
        with self._changed:
            self.wakeup.clear()
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            return new, [job for job in dict.fromkeys(cancelled) if job.sequence.id in self._jobs]

    def remove(self, job: Job) -> None:
        """This one has its completion."""
        with self._changed:
            del self._jobs[job.sequence.id]
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Take no more from now on, for this reason."""
        with self._changed:
            self._closed = self._closed or why

    def abandon(self) -> None:
        """Nobody works on what is left: wake who waits for it."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def wait(self, timeout_secs: float) -> None:
        """Until all are finished or abandoned, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs or self._abandoned, timeout_secs)
