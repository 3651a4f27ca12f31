"""What the packed formats share: a run of one quantised linear, and arithmetic on packed words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.weights import Int4Weight, ZeroKind
from batchtp.model.quantization import ModuleScheme
from batchtp.model.readers.safetensors import TensorFiles

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class LinearRun:
    """Which part of a linear is wanted: rows of its k inputs, columns of its n outputs.

    `module` is its full name in the checkpoint.
    """

    module: str
    k: int
    n: int
    rows: range
    columns: range


@dataclass(frozen=True, slots=True)
class PackedRun:
    """A run as read, K-packed as in kernels.weights but `bits` wide.

    words: int32 [ceil(rows * bits / 32), n]. scales [groups, n]. zeros: uint8 [groups, n].
    """

    bits: int
    words: Tensor
    scales: Tensor
    zeros: Tensor
    rows: int
    group_size: int
    first_group_offset: int
    group_index: Tensor | None


class PackedReader(Protocol):
    """Reads a run of a quantised linear of one format."""

    #: The tensor that a module has exactly when it is stored quantised.
    marker: str

    def read(self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme) -> PackedRun:
        """The run. Raises CheckpointError for a missing or malformed tensor."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A run's groups: which rows of the scales it needs, and where it starts in the first."""

    total: int
    size: int
    rows: range
    first_offset: int

    @staticmethod
    def of(run: LinearRun, scheme: ModuleScheme, whole: bool) -> Groups:
        """`whole`: every group is needed, since an act-order index points anywhere."""
        size = scheme.group_size or run.k
        total = -(-run.k // size)
        if whole:
            return Groups(total, size, range(total), 0)
        first, stop = run.rows.start // size, -(-run.rows.stop // size)
        return Groups(total, size, range(first, stop), run.rows.start % size)


def finish(run: PackedRun, dtype: torch.dtype) -> Int4Weight | Tensor:
    """The internal weight: an Int4Weight, or for 8 bits a dense [n, k] in `dtype`."""
    n = run.words.shape[1]
    if run.bits == 4:
        return Int4Weight(
            qweight=run.words.contiguous(),
            scales=run.scales.contiguous(),
            zeros=run.zeros.contiguous(),
            zero_kind=ZeroKind.INTEGER,
            k=run.rows,
            n=n,
            group_size=run.group_size,
            first_group_offset=run.first_group_offset,
            group_index=run.group_index,
        )
    index = run.group_index
    if index is None:
        rows = torch.arange(run.rows, device=run.words.device)
        index = (rows + run.first_group_offset) // run.group_size
    index = index.long()
    values = unpack_rows(run.words, run.bits)[: run.rows].float()
    dense = (values - run.zeros[index].float()) * run.scales[index].float()
    return dense.t().to(dtype).contiguous()


def covering(run: range, unit: int) -> range:
    """The packed words that hold a run, `unit` values each."""
    return range(run.start // unit, -(-run.stop // unit)) if run else range(0)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Words packed along the first dimension to their values: uint8 [rows * 32 / bits, n]."""
    per_word, mask = _WORD_BITS // bits, (1 << bits) - 1
    values = torch.empty(
        (words.shape[0], per_word, words.shape[1]), dtype=torch.uint8, device=words.device
    )
    for i in range(per_word):
        values[:, i] = ((words >> (bits * i)) & mask).to(torch.uint8)
    return values.flatten(0, 1)


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """The reverse: uint8 [rows, n] to int32 words, zero bits after the last row."""
    per_word = _WORD_BITS // bits
    rows, n = values.shape
    words = torch.zeros((-(-rows // per_word), n), dtype=torch.int32, device=values.device)
    for i in range(per_word):
        part = values[i::per_word].to(torch.int32)
        words[: part.shape[0]] |= part << (bits * i)
    return words


def rows_from(words: Tensor, bits: int, run: range) -> Tensor:
    """Of the words that cover a run of rows, the run itself, packed from its own first row."""
    per_word = _WORD_BITS // bits
    skip = run.start % per_word
    if not skip:
        return words
    return pack_rows(unpack_rows(words, bits)[skip : skip + len(run)], bits)


def checked_index(
    stored: Tensor, groups: Groups, run: LinearRun, file_tensor: str
) -> Tensor | None:
    """An act-order index, int32 [rows]; None where it says what plain order says.

    `groups` are the plain order's. Raises CheckpointError when it points outside the scales.
    """
    if bool(((stored < 0) | (stored >= groups.total)).any()):
        raise CheckpointError(
            f"Tensor {file_tensor} points outside the {groups.total} groups of {run.module}."
        )
    rows = torch.arange(run.rows.start, run.rows.stop, device=stored.device)
    plain = torch.equal(stored.long(), rows // groups.size)
    return None if plain else stored.to(torch.int32).contiguous()
