"""Result files, in OpenAI's batch output format and input order, never half written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from batchtp.client import Batch
from batchtp.errors import InputError


def check_writable(*files: Path) -> None:
    """Raise InputError before any work is done if a result could not be written there."""
    for file in files:
        folder = file.absolute().parent
        if not folder.is_dir():
            raise InputError(f"Cannot write {file}: there is no directory {folder}.")
        if file.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"Cannot write {file}: it is a directory, or not yours to write.")


def write_results(batch: Batch, output: Path, errors: Path) -> tuple[int, int]:
    """Write the rows that succeeded and those that failed; how many of each.

    Without failures there is no error file, and one of an earlier run is removed.
    """
    written = failed = 0
    with _replacing(output) as good, _replacing(errors) as bad:
        for line in batch.output_lines():
            if line["error"] is None:
                written += 1
                good.write(_dump(line))
            else:
                failed += 1
                bad.write(_dump(line))
    if not failed:
        errors.unlink()
    return written, failed


@contextmanager
def _replacing(file: Path) -> Iterator[IO[str]]:
    descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _dump(line: object) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"
