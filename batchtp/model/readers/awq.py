"""AWQ in the GEMM layout, 4 bits.

qweight int32 [K, N / 8]        eight columns a word, in the order 0 2 4 6 1 3 5 7
qzeros  int32 [groups, N / 8]   likewise
scales  float [groups, N]
w = (q - zero) * scale
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchtp.model.quantization import ModuleScheme
from batchtp.model.readers.packed import Groups, LinearRun, PackedRun, covering
from batchtp.model.readers.safetensors import TensorFiles

_PER_WORD = 8
# The column of each nibble, lowest first.
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# A transpose in three steps: the distance of the rows exchanged, and the nibbles that stay.
_SWAPS = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))


class AwqReader:
    """Reads AWQ modules."""

    marker = "qweight"

    def read(self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme) -> PackedRun:
        """See PackedReader."""
        groups = Groups.of(run, scheme, whole=False)
        packed_n = -(-run.n // _PER_WORD)
        covered = covering(run.columns, _PER_WORD)
        skip = run.columns.start % _PER_WORD
        wanted = slice(skip, skip + len(run.columns))
        words = files.integers(f"{run.module}.qweight", (run.k, packed_n), run.rows, covered)
        zeros = files.integers(
            f"{run.module}.qzeros", (groups.total, packed_n), groups.rows, covered
        )
        scales = files.floats(
            f"{run.module}.scales", (groups.total, run.n), groups.rows, run.columns
        )
        return PackedRun(
            bits=scheme.bits,
            words=_repacked(words)[:, wanted],
            scales=scales,
            zeros=_nibbles(zeros)[:, wanted],
            rows=len(run.rows),
            group_size=groups.size,
            first_group_offset=groups.first_offset,
            group_index=None,
        )


def _repacked(words: Tensor) -> Tensor:
    """Words along N to words along K: each 8 by 8 square of nibbles transposed in place."""
    k, packed_n = words.shape
    padding = -k % _PER_WORD
    if padding:
        words = torch.cat((words, words.new_zeros((padding, packed_n))))
    rows = [words[i::_PER_WORD].clone() for i in range(_PER_WORD)]
    for distance, low in _SWAPS:
        for i in range(_PER_WORD):
            if not i & distance:
                _swap(rows[i], rows[i + distance], 4 * distance, low)
    out = words.new_empty((rows[0].shape[0], packed_n, _PER_WORD))
    for nibble, column in enumerate(_COLUMNS):
        out[:, :, column] = rows[nibble]
    return out.flatten(1)


def _swap(a: Tensor, b: Tensor, shift: int, low: int) -> None:
    """Exchange the nibbles of a above `shift` with those of b below it, in place."""
    differ = ((a >> shift) ^ b) & low
    b ^= differ
    a ^= differ << shift


def _nibbles(words: Tensor) -> Tensor:
    """uint8 [rows, N] of words packed along N."""
    out = torch.empty((*words.shape, _PER_WORD), dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(_COLUMNS):
        out[:, :, column] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return out.flatten(1)
