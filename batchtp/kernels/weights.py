"""The one internal int4 weight that every checkpoint format becomes, and its exact meaning.

    w[k, n] = (q[k, n] - zeros[g(k), n]) * scales[g(k), n]      ZeroKind.INTEGER
    w[k, n] =  q[k, n] * scales[g(k), n] + zeros[g(k), n]       ZeroKind.MINIMUM

    q[k, n] = (qweight[k // 8, n] >> (4 * (k % 8))) & 15
    g(k)    = group_index[k]                                   under act-order
            = (first_group_offset + k) // group_size            otherwise

A TP rank's run of rows may start inside a group: `first_group_offset` is how many rows of that
group belong to the ranks before. Rows past `k` in the last packed word are nibbles of no meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class ZeroKind(enum.StrEnum):
    """What `zeros` means."""

    INTEGER = "integer"  # uint8 zero points, 0..16
    MINIMUM = "minimum"  # an additive minimum, same dtype as the scales (GGUF Q4_1)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A linear's weight [k, n] (in features by out features) in four bits.

    qweight: int32 [ceil(k / 8), n]. scales: float [groups, n]. zeros: [groups, n], see ZeroKind.
    group_size: rows in a group (for one group per column: k, or the unsharded k).
    group_index: int32 [k] under act-order (indexes the *full* scales), else None.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    zero_kind: ZeroKind
    k: int
    n: int
    group_size: int
    first_group_offset: int = 0
    group_index: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        parts = [self.qweight, self.scales, self.zeros]
        if self.group_index is not None:
            parts.append(self.group_index)
        return sum(t.numel() * t.element_size() for t in parts)


def row_groups(weight: Int4Weight) -> torch.Tensor:
    """g(k) for every row: int64 [k]."""
    if weight.group_index is not None:
        return weight.group_index.long()
    rows = torch.arange(weight.k, device=weight.qweight.device)
    return (rows + weight.first_group_offset) // weight.group_size


def unpack(weight: Int4Weight) -> torch.Tensor:
    """The nibbles q: int32 [k, n]."""
    shifts = torch.arange(0, 32, 4, device=weight.qweight.device, dtype=torch.int32)
    nibbles = (weight.qweight[:, None, :] >> shifts[None, :, None]) & 15
    return nibbles.reshape(-1, weight.n)[: weight.k]


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack q [k, n] (values 0..15) into int32 [ceil(k / 8), n]; missing rows become 0."""
    k, n = nibbles.shape
    padded = torch.zeros((-(-k // 8) * 8, n), dtype=torch.int32, device=nibbles.device)
    padded[:k] = nibbles.to(torch.int32)
    shifts = torch.arange(0, 32, 4, device=nibbles.device, dtype=torch.int32)
    shifted = padded.reshape(-1, 8, n) << shifts[None, :, None]
    # Disjoint bits: the sum is the bitwise or; int64 keeps the top nibble from overflowing.
    return shifted.to(torch.int64).sum(1).to(torch.int32)


def dequantize(weight: Int4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as [k, n], computed in float32 (exact for float16 scales) and cast to `dtype`."""
    groups = row_groups(weight)
    q = unpack(weight).float()
    scales = weight.scales.float()[groups]
    zeros = weight.zeros.float()[groups]
    if weight.zero_kind is ZeroKind.INTEGER:
        return ((q - zeros) * scales).to(dtype)
    return (q * scales + zeros).to(dtype)
