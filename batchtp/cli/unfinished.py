"""Which batch an interrupted `batchtp run` left, so that the same command goes on with it."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path


class UnfinishedRun:
    """The record of one run: the same file for the same model has the same record."""

    def __init__(self, home: Path, file: Path, *options: str) -> None:
        digest = hashlib.sha256("\0".join(options).encode())
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        self._record = home / "runs" / digest.hexdigest()[:32]

    def batch_id(self) -> tuple[str, bool]:
        """The id to submit under, and whether an earlier run used it already."""
        if self._record.exists():
            known = self._record.read_text(encoding="utf-8").strip()
            if known:
                return known, True
        new = f"batch_{uuid.uuid4().hex}"
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._record.with_suffix(".partial")
        partial.write_text(new, encoding="utf-8")
        partial.replace(self._record)
        return new, False

    def forget(self) -> None:
        """The run has delivered its output."""
        self._record.unlink(missing_ok=True)
