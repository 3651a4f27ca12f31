"""A rank's share of a model in one file, in the layout that its device computes with.

    8 bytes      magic, with the format's version
    8 bytes      length of the header, little-endian
    header       JSON: {"bytes": data bytes, "weights": {name: [part, ...]}}
                 part: {"kind", "values", "tensors": {name: [dtype, shape, offset, checksum]}}
    data         from the next multiple of 4096; every tensor at a multiple of 256

Loading is one copy of the data to the device: the tensors are views of it. 256 bytes is what a CUDA
allocation is aligned to, so kernels see what they would see of tensors of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.checksum import checksums
from batchtp.kernels.flat import Flat, Stored, flatten, rebuild
from batchtp.model.ranged import THREADS, RangedFile, Span

Weights: TypeAlias = Mapping[str, Stored | tuple[Stored, ...]]

_MAGIC = b"btpshrd1"
_ALIGNMENT = 256
_PAGE = 4096
# Staging for a device: large enough for full speed, small beside any shard.
_STAGED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor and where its bytes go."""

    tensor: Tensor
    offset: int


def write_shard(path: Path, weights: Weights) -> int:
    """Write a file that read_shard gives the weights of; its bytes. Raises OSError."""
    header, places, size = _plan(weights)
    head = json.dumps(header).encode()
    head = _MAGIC + len(head).to_bytes(8, "little") + head
    start = _aligned(len(head), _PAGE)
    staging = _Staging(places[0].tensor.device if places else torch.device("cpu"))

    def write(piece: _Place) -> None:
        with staging.borrow(piece.tensor.numel()) as host:
            host.copy_(piece.tensor)
            _write(file.fileno(), start + piece.offset, host.numpy().data)

    with path.open("wb") as file, ThreadPoolExecutor(THREADS) as threads:
        file.write(head)
        file.flush()
        file.truncate(start + size)
        # Copies from the device and writes of several pieces overlap.
        for _ in threads.map(write, _pieces(places)):
            pass
    return start + size


def read_shard(path: Path, device: torch.device) -> dict[str, Stored | tuple[Stored, ...]]:
    """The weights, on the device, each checked against its checksum.

    Raises CheckpointError when the file is not whole.
    """
    with closing(RangedFile(path)) as file:
        header, start = _header(file)
        arena = torch.empty(header["bytes"], dtype=torch.uint8, device=device)
        _fill(arena, file, start)
    try:
        return _weights(header, arena, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: {error!r}.") from error


def _plan(weights: Weights) -> tuple[dict[str, Any], list[_Place], int]:
    """The header, every tensor's place, and the bytes of all."""
    flats = {name: [flatten(part) for part in _parts(weight)] for name, weight in weights.items()}
    tensors = [t for parts in flats.values() for part in parts for t in part.tensors.values()]
    sums = iter(checksums(tensors))
    places: list[_Place] = []
    size = 0
    header: dict[str, Any] = {}
    for name, parts in flats.items():
        header[name] = []
        for part in parts:
            entry: dict[str, Any] = {}
            for key, tensor in part.tensors.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                entry[key] = [dtype, list(tensor.shape), size, next(sums)]
                places.append(_Place(tensor, size))
                size = _aligned(size + tensor.nbytes, _ALIGNMENT)
            header[name].append({"kind": part.kind, "values": part.values, "tensors": entry})
    return {"bytes": size, "weights": header}, places, size


def _parts(weight: Stored | tuple[Stored, ...]) -> tuple[Stored, ...]:
    return weight if isinstance(weight, tuple) else (weight,)


def _pieces(places: Iterable[_Place]) -> Iterator[_Place]:
    """Cut into pieces that fit the staging."""
    for place in places:
        octets = place.tensor.contiguous().view(-1).view(torch.uint8)
        for at in range(0, octets.numel(), _STAGED_BYTES):
            yield _Place(octets[at : at + _STAGED_BYTES], place.offset + at)


def _write(descriptor: int, at: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


class _Staging:
    """A buffer for each thread: in pinned memory, which a device copies to and from at full speed,
    and used again, because fresh pages cost more than the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(THREADS):
            pin = device.type == "cuda"
            self._free.put(torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=pin))

    @contextmanager
    def borrow(self, size: int) -> Iterator[Tensor]:
        """`size` bytes of a buffer that nobody else has."""
        buffer = self._free.get()
        try:
            yield buffer[:size]
        finally:
            self._free.put(buffer)


def _header(file: RangedFile) -> tuple[dict[str, Any], int]:
    fixed = bytearray(16)
    file.read(Span(0, 1, 16, 0, 16), memoryview(fixed))
    size = int.from_bytes(fixed[8:], "little")
    if fixed[:8] != _MAGIC or size > os.stat(file.path).st_size:
        raise CheckpointError(f"{file.path} is not a shard file of this version.")
    raw = bytearray(size)
    file.read(Span(16, 1, size, 0, size), memoryview(raw))
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file.path} is corrupt: {error}.") from error
    start = _aligned(16 + size, _PAGE)
    if not isinstance(header, dict) or start + header.get("bytes", -1) != file.size():
        raise CheckpointError(f"{file.path} is cut short or corrupt.")
    return header, start


def _fill(arena: Tensor, file: RangedFile, start: int) -> None:
    """Copy the data: straight into host memory, in pinned pieces to a device."""
    if arena.device.type == "cpu":
        file.read(_span(start, arena.numel()), arena.numpy().data)
        return
    staging = _Staging(arena.device)

    def copy(at: int) -> None:
        piece = arena[at : at + _STAGED_BYTES]
        with staging.borrow(piece.numel()) as host:
            file.read(_span(start + at, piece.numel()), host.numpy().data)
            piece.copy_(host)

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(copy, range(0, arena.numel(), _STAGED_BYTES)):
            pass


def _span(start: int, size: int) -> Span:
    return Span(start, 1, size, 0, size)


def _weights(
    header: Mapping[str, Any], arena: Tensor, path: Path
) -> dict[str, Stored | tuple[Stored, ...]]:
    weights: dict[str, Stored | tuple[Stored, ...]] = {}
    promised: list[int] = []
    tensors: list[Tensor] = []
    for name, parts in header["weights"].items():
        built = []
        for part in parts:
            views = {key: _view(arena, entry) for key, entry in part["tensors"].items()}
            tensors += views.values()
            promised += [entry[3] for entry in part["tensors"].values()]
            built.append(rebuild(Flat(part["kind"], part["values"], views)))
        weights[name] = built[0] if len(built) == 1 else tuple(built)
    if checksums(tensors) != promised:
        raise CheckpointError(f"{path} is corrupt: a tensor's checksum is not what was written.")
    return weights


def _view(arena: Tensor, entry: list[Any]) -> Tensor:
    name, shape, offset, _ = entry
    dtype: torch.dtype = getattr(torch, name)
    size = dtype.itemsize
    for length in shape:
        size *= length
    return arena[offset : offset + size].view(dtype).view(shape)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def pieces(weights: Weights) -> Iterator[Tensor]:
    """Every tensor of the weights."""
    for weight in weights.values():
        for part in _parts(weight):
            yield from flatten(part).tensors.values()
