"""The int4 weight as the kernel reads it, made once at load.

Rows are dealt into tiles of eight slices of 16. Word j of column n in tile t holds eight rows that
lie a slice apart, so that one load of words feeds eight products over whole slices of K:

    (words[t, n, j] >> 4 i) & 15  =  q[128 t + 16 i + j, n]

A run is a power-of-two number of neighbouring slices whose rows share a group in every tile. Where
groups do not line up with slices, and under act-order, `run_slices` is 0: a scale for every row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from batchtp.errors import KernelInputError
from batchtp.kernels.weights import Int4Weight, ZeroKind

# The tensor cores' K for 16-bit numbers. Slices of 32 would leave no shared memory for 128 rows.
SLICE_ROWS = 16
TILE_ROWS = 8 * SLICE_ROWS
# K is split so that about two programs an SM (H200: 132) share a matmul of few rows. The split is
# of the weight alone: the same for every M, so a row's result does not depend on its neighbours.
_PROGRAMS = 264
_PROGRAM_COLUMNS = 64
# A shorter share of K than this many tiles would cost more to add up than it saves.
_LEAST_TILES = 4
# Nibbles unpacked at a time while packing, as int32: 256 MiB.
_MOST_UNPACKED = 1 << 26


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """An int4 weight [k, n] for the kernel; see the module's docstring and Int4Weight.

    words: int32 [tiles, n, 16]. scales, zeros [groups, n]. group_index: int32
    [tiles * 128] under act-order. splits: shares of K that are added up in order.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor
    zero_kind: ZeroKind
    k: int
    n: int
    group_size: int
    first_group_offset: int
    group_index: Tensor | None
    run_slices: int
    splits: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (self.words, self.scales, self.zeros, self.group_index)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def pack(weight: Int4Weight) -> PackedInt4:
    """Reorder a weight's nibbles. Raises KernelInputError where its tensors do not fit together."""
    check_weight(weight)
    # One group for all rows has no boundaries, however many rows there are.
    one_group = weight.scales.shape[0] == 1
    group_size = 1 << 30 if one_group else weight.group_size
    offset = 0 if one_group else weight.first_group_offset
    act_order = weight.group_index is not None and not one_group
    tiles = -(-weight.k // TILE_ROWS)
    index = None
    if act_order and weight.group_index is not None:
        index = weight.group_index.new_zeros(tiles * TILE_ROWS, dtype=torch.int32)
        index[: weight.k] = weight.group_index
    return PackedInt4(
        words=_reorder(weight, tiles),
        scales=weight.scales.contiguous(),
        zeros=weight.zeros.contiguous(),
        zero_kind=weight.zero_kind,
        k=weight.k,
        n=weight.n,
        group_size=group_size,
        first_group_offset=offset,
        group_index=index,
        run_slices=0 if act_order else math.gcd(group_size, offset, TILE_ROWS) // SLICE_ROWS,
        splits=_splits(weight.n, tiles),
    )


def _splits(n: int, tiles: int) -> int:
    columns = max(1, -(-n // _PROGRAM_COLUMNS))
    wanted = min(-(-_PROGRAMS // columns), max(1, tiles // _LEAST_TILES))
    # As many shares as whole tiles make: none is empty.
    return max(1, -(-tiles // -(-tiles // wanted))) if tiles else 1


def _reorder(weight: Int4Weight, tiles: int) -> Tensor:
    rows = SLICE_ROWS
    source = weight.qweight
    words = torch.zeros((tiles, weight.n, rows), dtype=torch.int32, device=source.device)
    step = max(1, _MOST_UNPACKED // max(1, TILE_ROWS * weight.n))
    shifts = torch.arange(0, 32, 4, device=source.device, dtype=torch.int32)[:, None]
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        part = torch.zeros(
            ((last - first) * rows, weight.n), dtype=torch.int32, device=source.device
        )
        read = source[first * rows : last * rows]
        part[: read.shape[0]] = read
        nibbles = ((part[:, None, :] >> shifts) & 15).view(last - first, 8, rows, weight.n)
        for i in range(8):
            words[first:last] |= (nibbles[:, i] << (4 * i)).transpose(1, 2)
    return words


def check_weight(weight: Int4Weight) -> None:
    """Raises KernelInputError where a weight's tensors do not fit together."""
    groups = weight.scales.shape[0]
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "qweight": (weight.qweight, (-(-weight.k // 8), weight.n)),
        "scales": (weight.scales, (groups, weight.n)),
        "zeros": (weight.zeros, (groups, weight.n)),
    }
    if weight.group_index is not None:
        wanted["group_index"] = (weight.group_index, (weight.k,))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise KernelInputError(
                f"The int4 weight's {name} is {list(tensor.shape)}; it must be {list(shape)}."
            )
        if tensor.device != weight.qweight.device:
            raise KernelInputError(
                f"The int4 weight's {name} is on {tensor.device}, its qweight on "
                f"{weight.qweight.device}."
            )
    if weight.group_size < 1 or not 0 <= weight.first_group_offset < max(weight.group_size, 1):
        raise KernelInputError(
            f"The int4 weight's groups of {weight.group_size} rows cannot start at offset "
            f"{weight.first_group_offset}."
        )
    last_group = (weight.first_group_offset + weight.k - 1) // weight.group_size
    if weight.group_index is None and weight.k and last_group >= groups:
        raise KernelInputError(
            f"The int4 weight has {groups} groups of scales; its {weight.k} rows need "
            f"{last_group + 1}."
        )
