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
    """Words along N to words along K, without ever holding the nibbles one by one."""
    k, packed_n = words.shape
    out = torch.zeros(
        (-(-k // _PER_WORD), packed_n, _PER_WORD), dtype=torch.int32, device=words.device
    )
    for row in range(_PER_WORD):
        part = words[row::_PER_WORD]
        for nibble, column in enumerate(_COLUMNS):
            out[: part.shape[0], :, column] |= ((part >> (4 * nibble)) & 15) << (4 * row)
    return out.flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """uint8 [rows, N] of words packed along N."""
    out = torch.empty((*words.shape, _PER_WORD), dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(_COLUMNS):
        out[:, :, column] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return out.flatten(1)
