"""Reads runs of stored tensors by offset: exactly their bytes, into the caller's memory. No torch.

Not mapped: pages of a mapping would count as the process's memory beside the copy that is made of
them, and a file that shrinks under a mapping kills the process where a read gives an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from batchtp.errors import CheckpointError

# One call to the kernel moves at most 2 GiB less a page.
_MOST_BYTES = 1 << 30


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
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error}") from error

    def close(self) -> None:
        """Let the file go. Idempotent."""
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
        if span.width == span.stride or span.rows == 1:
            self._fill(into, span.start + span.skip)
            return
        at = span.start + span.skip
        for first in range(0, span.nbytes, span.width or 1):
            self._fill(into[first : first + span.width], at)
            at += span.stride

    def _fill(self, into: memoryview, at: int) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._fd, [into[done : done + _MOST_BYTES]], at + done)
            except OSError as error:
                raise CheckpointError(f"Cannot read {self.path} at byte {at}: {error}") from error
            if not got:
                raise CheckpointError(
                    f"{self.path} is cut short: it ends before byte {at + len(into)}. "
                    "Download it again."
                )
            done += got
        self.bytes_read += done
