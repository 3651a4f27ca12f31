"""A file lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from batchtp.errors import EmbeddedServiceError


class FileLock:
    """flock on one file. Not inherited by programs that the holder starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, *, shared: bool = False, timeout_secs: float | None = None) -> bool:
        """Take the lock; False when it did not come in time (None: wait as long as it takes)."""
        if self._fd is None:
            self._fd = self._open()
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if timeout_secs is None:
            fcntl.flock(self._fd, kind)
            return True
        deadline = time.monotonic() + timeout_secs
        while True:
            try:
                fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            else:
                return True

    def release(self) -> None:
        """Give the lock back. Does nothing when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def write(self, text: str) -> None:
        """Replace the lock file's text, for people and for `read`."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def read(self) -> str:
        """The lock file's text."""
        return self._path.read_text(encoding="utf-8")

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise EmbeddedServiceError(
                f"Cannot use the data directory {self._path.parent.parent}: {error}. "
                "Run as the user it belongs to, or set BATCHTP_HOME to another directory."
            ) from error


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock exclusively right now."""
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        return not lock.acquire(shared=True, timeout_secs=0)
    finally:
        lock.release()
