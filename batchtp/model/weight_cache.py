"""Shards on disk as their device computes with them, so that a second load is a copy.

    DIRECTORY/<digest of the checkpoint and of how it is loaded>/rank-<rank>-of-<tp>.shard

The digest covers the config files whole, and of every weights file its name, size, time of change,
head and samples of its bytes. Another version of the layout, another dtype, another quantisation is
another digest. What is corrupt is written again; what was not used for longest goes first when the
cache or its disk is full. Nobody but this program may write here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchtp.errors import CheckpointError
from batchtp.model.shard_file import Weights, pieces, read_shard, write_shard

log = logging.getLogger(__name__)

# Raised whenever a reader, the fusing of linears or the kernel's layout changes what is stored.
LAYOUT_VERSION = 1
# A disk that is full to the last byte breaks more than this cache.
_SPARE_BYTES = 1 << 30
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_SUFFIX = ".shard"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What makes one shard differ from another. `layout`: who computes, `kernel` or `plain`."""

    checkpoint: str
    layout: str
    dtype: str
    quantize: str
    tp: int
    rank: int

    @property
    def folder(self) -> str:
        """The name of the folder of its group."""
        facts = [LAYOUT_VERSION, self.checkpoint, self.layout, self.dtype, self.quantize, self.tp]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"rank-{self.rank}-of-{self.tp}{_SUFFIX}"


def checkpoint_digest(path: Path) -> str:
    """A digest that changes when a checkpoint does: see the module. Raises CheckpointError."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.iterdir())
    try:
        for file in files:
            if file.suffix == ".json":
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
            elif file.suffix in (".safetensors", ".gguf"):
                digest.update(_sampled(file))
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error
    return digest.hexdigest()


def _sampled(file: Path) -> bytes:
    facts = file.stat()
    digest = hashlib.sha256(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    with file.open("rb") as opened:
        for sample in range(_SAMPLES):
            opened.seek(facts.st_size * sample // _SAMPLES)
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


class WeightCache:
    """A directory of shards of at most `most_bytes` in all."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def load(self, key: CacheKey, device: torch.device) -> dict[str, Any] | None:
        """The shard, checked; None when it is not there. A corrupt one is removed, with a word."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            weights = read_shard(path, device)
        except CheckpointError as error:
            log.warning("the weight cache is not used: %s", error)
            path.unlink(missing_ok=True)
            return None
        # Read-only caches still serve.
        with contextlib.suppress(OSError):
            os.utime(path)
        return weights

    def store(self, key: CacheKey, weights: Weights) -> bool:
        """Write a shard for the next load, where there is room; says whether it did."""
        path = self._path(key)
        size = sum(tensor.nbytes for tensor in pieces(weights))
        # Its own process id: two groups may load the same model at once.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished(path.parent)
            if not self._make_room(size, path):
                log.warning(
                    "the weight cache has no room for %.2f GiB under %s: the next load reads the "
                    "checkpoint again",
                    size / 2**30,
                    self._directory,
                )
                return False
            write_shard(unfinished, weights)
            unfinished.replace(path)
        except OSError as error:
            log.warning("the weight cache could not be written: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        return True

    def _path(self, key: CacheKey) -> Path:
        return self._directory / key.folder / key.file

    def _make_room(self, size: int, path: Path) -> bool:
        """Remove what was used least lately until `size` more bytes fit; False when they cannot."""
        others = [file for file in self._files() if file.parent != path.parent]
        others.sort(key=lambda file: file.stat().st_mtime)
        while not self._fits(size):
            if not others:
                return False
            victim = others.pop(0)
            victim.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                victim.parent.rmdir()
        return True

    def _fits(self, size: int) -> bool:
        held = sum(file.stat().st_size for file in self._files())
        free = shutil.disk_usage(self._directory).free
        return held + size <= self._most_bytes and size + _SPARE_BYTES <= free

    def _files(self) -> list[Path]:
        return list(self._directory.glob(f"*/*{_SUFFIX}"))

    def _remove_unfinished(self, folder: Path) -> None:
        """What a killed process left: its number is the name's end."""
        for file in folder.glob(f"*{_SUFFIX}.*"):
            number = file.suffix.removeprefix(".")
            if number.isdigit() and not Path("/proc", number).exists():
                file.unlink(missing_ok=True)
