"""Reads runs of stored tensors by offset: exactly their bytes, into the caller's memory. No torch.

Not mapped: pages of a mapping would count as the process's memory beside the copy that is made of
them, and a file that shrinks under a mapping kills the process where a read gives an error.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from batchtp.errors import CheckpointError

# One thread copies about 3 GB/s out of the page cache; a device takes 55 GB/s.
THREADS = 8
# Below this a run is read before threads are at work.
_PARALLEL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a stored matrix, or a run of bytes in each: `start` is the first row's first byte in
    the file, `stride` from row to row, and `skip` and `width` pick the run's bytes in a row.
    """

    start: int
    rows: int
    stride: int
    skip: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return self.rows * self.width


class RangedFile:
    """A file open for reading runs. `bytes_read` counts what was asked of the kernel."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when it cannot be opened."""
        self.path = path
        self.bytes_read = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="read")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error}") from error

    def close(self) -> None:
        """Let the file go. Idempotent."""
        self._threads.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def size(self) -> int:
        """Bytes of the whole file."""
        return os.fstat(self._fd).st_size

    def read(self, span: Span, into: memoryview) -> None:
        """Fill `into`, span.nbytes bytes long, with the run.

        Raises CheckpointError when the file ends before the run or the device fails.
        """
        self.bytes_read += span.nbytes
        at = span.start + span.skip
        if span.width == span.stride or span.rows == 1:
            self._fill_by_threads(into, at)
            return
        for first in range(0, span.nbytes, span.width or 1):
            self._fill(into[first : first + span.width], at)
            at += span.stride

    def _fill_by_threads(self, into: memoryview, at: int) -> None:
        step = max(-(-len(into) // THREADS), _PARALLEL_BYTES // 2)
        starts = range(0, len(into), step)
        if len(into) <= _PARALLEL_BYTES:
            self._fill(into, at)
            return
        for _ in self._threads.map(
            lambda first: self._fill(into[first : first + step], at + first), starts
        ):
            pass

    def _fill(self, into: memoryview, at: int) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._fd, [into[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"Cannot read {self.path} at byte {at}: {error}") from error
            if not got:
                raise CheckpointError(
                    f"{self.path} is cut short: it ends before byte {at + len(into)}. "
                    "Download it again."
                )
            done += got
