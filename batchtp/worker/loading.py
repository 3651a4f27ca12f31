"""Tells people how far the model has loaded: a bar on a terminal, log lines, word to clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

# A sign of life for who waits, and no flood of lines and keys.
_TELL_EVERY_SECS = 1.0
_LOG_EVERY_SECS = 10.0


class LoadingReport:
    """One load after another. `tell` sends the share that is loaded, 0 to 1, to who waits."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._told_at = 0.0
        self._logged_at = time.monotonic()

    def show(self, done: float) -> None:
        """So much is loaded. From any thread, one at a time."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_SECS and done < 1:
            self._told_at = now
            self._tell(done)
        if self._console.is_terminal:
            self._draw(done)
        elif now - self._logged_at >= _LOG_EVERY_SECS:
            self._logged_at = now
            log.info("loading the model: %d %%", round(100 * done))

    def _draw(self, done: float) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("loading the model"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("load", total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)
        if done >= 1:
            self.end()

    def end(self) -> None:
        """Take the bar away. Idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
