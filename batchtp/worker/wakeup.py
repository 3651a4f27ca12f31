"""A flag that a thread waiting in a selector can see."""

from __future__ import annotations

import contextlib
import os
import weakref


class Wakeup:
    """Set from any thread; readable until cleared. The descriptor lives as long as this does."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._fd

    def set(self) -> None:
        """Wake whoever waits, now or next time."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Back to sleep."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
