"""Where the ranks of one generation find each other: a temporary folder of its own.

Its owner holds a lock on it that the kernel drops with the process, so the folder of a killed owner
can be told from one in use, in whatever container that is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "batchtp-group-"
# Between making a folder and locking it lie microseconds; this is far more.
_UNCLAIMED_SECS = 60.0


class MeetingPlace:
    """A fresh, locked folder: in a stale one old and new ranks would meet."""

    def __init__(self) -> None:
        """Also removes what killed owners left behind."""
        remove_abandoned()
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock: int | None = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def rendezvous(self) -> str:
        """The path of the ranks' FileStore."""
        return str(Path(self._folder) / "rendezvous")

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self._folder)
        os.close(self._lock)
        self._lock = None


def remove_abandoned() -> None:
    """Remove our user's folders that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            _remove_if_abandoned(folder)
        except FileNotFoundError:
            # Somebody else was quicker.
            continue


def _remove_if_abandoned(folder: Path) -> None:
    facts = folder.lstat()
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    if not ours or time.time() - facts.st_mtime < _UNCLAIMED_SECS:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        # It is in use.
        return
    finally:
        os.close(lock)
