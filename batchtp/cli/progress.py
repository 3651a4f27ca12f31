"""Progress of a batch: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from batchtp.client import Client
from batchtp.core import BatchStatus

# Long enough to span a few steps of a slow group, short enough to show a change of pace.
_WINDOW_SECS = 15.0
_LINE_EVERY_SECS = 5.0


class Pace:
    """How fast a batch goes, from looks at it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._first: tuple[float, int, int] | None = None

    def add(self, at_secs: float, tokens: int, rows: int) -> None:
        """At this time so many tokens were written and so many rows were done."""
        if self._seen and tokens < self._seen[-1][1] // 2:
            # Rows whose worker was lost are generated again.
            self._seen.clear()
        elif self._seen:
            # A row that just finished may count twice until the worker's next heartbeat.
            tokens = max(tokens, self._seen[-1][1])
        self._seen.append((at_secs, tokens, rows))
        if self._first is None or (tokens, rows) == self._first[1:]:
            # Until something moves the model is loading, which is not the batch's pace.
            self._first = (at_secs, tokens, rows)
        while len(self._seen) > 2 and at_secs - self._seen[0][0] > _WINDOW_SECS:
            self._seen.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Tokens written per second; 0 while unknown."""
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        span = last[0] - first[0]
        return (last[1] - first[1]) / span if span > 0 else 0.0

    @property
    def overall_tokens_per_second(self) -> float | None:
        """Tokens written per second since the first; None while unknown."""
        if self._first is None:
            return None
        tokens, span = self._seen[-1][1] - self._first[1], self._seen[-1][0] - self._first[0]
        return tokens / span if span > 0 and tokens > 0 else None

    def eta_secs(self, total_rows: int) -> float | None:
        """Seconds until the last row, at the pace since the first look; None while unknown."""
        if self._first is None:
            return None
        at_secs, _, rows = self._seen[-1]
        done = rows - self._first[2]
        return (total_rows - rows) * (at_secs - self._first[0]) / done if done > 0 else None


class ProgressView:
    """Shows statuses as they come, on standard error. A context manager."""

    def __init__(self, total: int | None = None) -> None:
        console = Console(stderr=True, highlight=False)
        self._live = console.is_terminal
        self.pace = Pace()
        self._last_line = time.monotonic() - _LINE_EVERY_SECS
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=total, text="")

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def phase(self, text: str) -> None:
        """What is going on before there is a status."""
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text, markup=False)

    def loading(self, done: float) -> None:
        """The model is being loaded, and so much of it is there, 0 to 1."""
        now = time.monotonic()
        if self._live:
            text = f"{100 * done:.0f} %"
            self._bar.update(
                self._task, description="loading the model", total=1, completed=done, text=text
            )
        elif now - self._last_line >= _LINE_EVERY_SECS:
            self._last_line = now
            self._console.print(f"loading the model: {100 * done:.0f} %", markup=False)

    def show(self, status: BatchStatus) -> None:
        """The batch as it stands now."""
        now = time.monotonic()
        counts = status.counts
        done = counts.completed + counts.failed
        self.pace.add(now, status.usage.completion_tokens, done)
        text = self._text(status)
        if self._live:
            self._bar.update(
                self._task,
                description=status.state.value.replace("_", " "),
                total=counts.total or None,
                completed=done,
                text=text,
            )
        elif now - self._last_line >= _LINE_EVERY_SECS or status.state.final:
            self._last_line = now
            self._console.print(f"{status.state.value}: {text}", markup=False)

    def _text(self, status: BatchStatus) -> str:
        counts = status.counts
        done = counts.completed + counts.failed
        parts = [f"{done}/{counts.total}"]
        if counts.failed:
            parts.append(f"{counts.failed} failed")
        parts.append(f"{self.pace.tokens_per_second:.1f} tokens/s")
        left = self.pace.eta_secs(counts.total)
        if left is not None and not status.state.final:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


def show_progress(view: ProgressView, client: Client, status: BatchStatus) -> None:
    """The batch as it stands, or how far its model has loaded while nothing can have begun."""
    loaded = None
    if status.started_at is None and not status.state.final:
        loaded = client.loaded_share(status.model)
    if loaded is None or loaded >= 1:
        view.show(status)
    else:
        view.loading(loaded)


def duration(seconds: float) -> str:
    """`5 s`, `3:05 min` or `2:03 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
