"""GGUF files: the header parsed here, the tensors mapped, nothing copied. No torch.

    magic "GGUF" | version u32 | tensors u64 | keys u64
    key:    name | type u32 | value
    tensor: name | dimensions u32 | sizes u64, innermost first | type u32 | offset u64
    data, at the next multiple of general.alignment; offsets count from there

Little-endian; a string is a u64 length and UTF-8 bytes. A linear's weight is [out, in] in rows of
whole blocks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtp.errors import CheckpointError, UnsupportedModelError
from batchtp.model.ranged import RangedFile, Span

Bytes = npt.NDArray[np.uint8]

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# A count above this is a corrupt file, not a model: it stops before memory does.
_MOST_ENTRIES = 1 << 26
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `weights` of them take `size` bytes."""

    name: str
    weights: int
    size: int


F32 = BlockType("F32", 1, 4)
F16 = BlockType("F16", 1, 2)
BF16 = BlockType("BF16", 1, 2)
Q4_0 = BlockType("Q4_0", 32, 2 + 16)
Q4_1 = BlockType("Q4_1", 32, 2 + 2 + 16)
Q8_0 = BlockType("Q8_0", 32, 2 + 32)
_TYPES = {0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 8: Q8_0, 30: BF16}
# Types that are not read, so that a refusal can name them.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is. `shape`: outermost first. `start`: its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the innermost dimension)."""
        return self.shape[-1] // self.type.weights * self.type.size

    @property
    def rows(self) -> int:
        """Rows of the innermost dimension."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's keys, and where its tensors are."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def integer(self, key: str) -> int | None:
        """A key's whole number, None when it is absent. Raises CheckpointError for another kind."""
        value = self.keys.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f"{self.path}: key {key} is {value!r}; expected a whole number.")
        return value


def read_blocks(opened: RangedFile, tensor: GgufTensor, rows: range, blocks: range) -> Bytes:
    """The bytes of a run of rows and blocks in them: uint8 [rows, blocks * block size].

    Raises CheckpointError when the file is cut short.
    """
    width = len(blocks) * tensor.type.size
    span = Span(
        start=tensor.start + rows.start * tensor.row_bytes,
        rows=len(rows),
        stride=tensor.row_bytes,
        skip=blocks.start * tensor.type.size,
        width=width,
    )
    found = np.empty((len(rows), width), dtype=np.uint8)
    opened.read(span, found.reshape(-1).data)
    return found


def open_gguf(path: Path) -> GgufFile:
    """Parse the header.

    Raises CheckpointError when it is not GGUF, cut short or corrupt; UnsupportedModelError for a
    version or tensor type that is not read.
    """
    try:
        # Mapped while the header is parsed: its end is not known before.
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            return _parsed(path, mapped)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error


def _parsed(path: Path, mapped: mmap.mmap) -> GgufFile:
    cursor = _Cursor(mapped, path)
    try:
        keys, tensors = _header(cursor)
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is cut short or corrupt: its header does not parse at byte {cursor.at}."
        ) from error
    for tensor in tensors.values():
        if tensor.start + tensor.nbytes > len(mapped):
            raise CheckpointError(
                f"{path} is cut short: tensor {tensor.name} ends at byte "
                f"{tensor.start + tensor.nbytes}, the file at {len(mapped)}. Download it again."
            )
    return GgufFile(path, keys, tensors)


def _header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file.")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{cursor.path}: GGUF version {version}; little-endian 2 and 3 are supported."
        )
    tensor_count, key_count = cursor.count(), cursor.count()
    keys = {}
    for _ in range(key_count):
        name = cursor.string()
        keys[name] = cursor.value(cursor.scalar("<I"))
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = keys.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}.")
    data = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, kind, data + at) for name, shape, kind, at in infos}
    return keys, tensors


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = cursor.string()
    dimensions = cursor.scalar("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {dimensions} dimensions.")
    shape = tuple(cursor.count(1 << 40) for _ in range(dimensions))[::-1]
    number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    kind = _TYPES.get(number)
    if kind is None:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {name} has type {_OTHER_TYPES.get(number, number)}; "
            f"{', '.join(t.name for t in _TYPES.values())} are supported."
        )
    if shape[-1] % kind.weights:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has rows of {shape[-1]}, which is no whole number of "
            f"{kind.name} blocks of {kind.weights}."
        )
    return name, shape, kind, offset


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.path = path
        self.at = 0
        self._data = data

    def take(self, size: int) -> bytes:
        raw = self._data[self.at : self.at + size]
        if len(raw) < size:
            raise struct.error("past the end")
        self.at += size
        return raw

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, most: int = _MOST_ENTRIES) -> int:
        value: int = self.scalar("<Q")
        if value > most:
            raise CheckpointError(
                f"{self.path} is corrupt: a count of {value} at byte {self.at - 8}."
            )
        return value

    def string(self) -> str:
        return self.take(self.count()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} is corrupt: value type {kind} at byte {self.at}.")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.count()
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        form = _SCALARS[kind]
        raw = self.take(struct.calcsize(form) * count)
        return [value for (value,) in struct.iter_unpack(form, raw)]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: no call for each."""
        found = []
        unpack, at, data = struct.Struct("<Q").unpack_from, self.at, self._data
        for _ in range(count):
            stop = at + 8 + unpack(data, at)[0]
            found.append(data[at + 8 : stop].decode("utf-8"))
            at = stop
        if at > len(data):
            raise struct.error("past the end")
        self.at = at
        return found
