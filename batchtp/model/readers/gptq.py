"""GPTQ (v1 and v2), with or without act-order, 4 and 8 bits.

    qweight int32 [K * bits / 32, N]   packed along K, in order: the internal layout already
    qzeros  int32 [groups, N * bits / 32]   packed along N, in order
    scales  float [groups, N]
    g_idx   int32 [K]   each row's group
    w = (q - zero) * scale

Version 1 stores the packed zeros less 1 in every field, subtracted from the whole word with borrow,
so the 1s are added back to the whole word. A symmetric file's zero is the middle of the range, and
both versions' stored words are known: that tells files apart whose config names the wrong version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchtp.model.quantization import ModuleScheme
from batchtp.model.readers.packed import (
    Groups,
    LinearRun,
    PackedRun,
    checked_index,
    covering,
    rows_from,
    unpack_rows,
)
from batchtp.model.readers.safetensors import TensorFiles

_WORDS = 1 << 32
# One in every field of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}


class GptqReader:
    """Reads GPTQ modules. `v2`: the config says that zero points are stored as they are."""

    marker = "qweight"

    def __init__(self, v2: bool) -> None:
        self._v2 = v2

    def read(self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme) -> PackedRun:
        """See PackedReader."""
        per_word = 32 // scheme.bits
        words = files.integers(
            f"{run.module}.qweight",
            (-(-run.k // per_word), run.n),
            covering(run.rows, per_word),
            run.columns,
        )
        groups, index = self._groups(files, run, scheme)
        scales = files.floats(
            f"{run.module}.scales", (groups.total, run.n), groups.rows, run.columns
        )
        return PackedRun(
            bits=scheme.bits,
            words=rows_from(words, scheme.bits, run.rows),
            scales=scales,
            zeros=self._zeros(files, run, scheme, groups),
            rows=len(run.rows),
            group_size=groups.size,
            first_group_offset=groups.first_offset,
            group_index=index,
        )

    def _groups(
        self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme
    ) -> tuple[Groups, Tensor | None]:
        plain = Groups.of(run, scheme, whole=False)
        name = f"{run.module}.g_idx"
        if name not in files:
            return plain, None
        index = checked_index(files.integers(name, (run.k,), run.rows), plain, run, name)
        return (plain if index is None else Groups.of(run, scheme, whole=True)), index

    def _zeros(
        self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme, groups: Groups
    ) -> Tensor:
        bits = scheme.bits
        per_word = 32 // bits
        stored = files.integers(
            f"{run.module}.qzeros",
            (groups.total, -(-run.n // per_word)),
            groups.rows,
            covering(run.columns, per_word),
        )
        ones = _ONES[bits]
        middle = 1 << (bits - 1)
        words = stored.long() % _WORDS
        if scheme.sym and _all_equal(words, ones * middle):
            v2 = True
        elif scheme.sym and _all_equal(words, ones * (middle - 1)):
            v2 = False
        else:
            v2 = self._v2
        if not v2:
            words = (words + ones) % _WORDS
        zeros = unpack_rows(words.t(), bits).t()
        skip = run.columns.start % per_word
        return zeros[:, skip : skip + len(run.columns)]


def _all_equal(words: Tensor, value: int) -> bool:
    return bool(torch.all(words == value))
