"""compressed-tensors, format pack-quantized, 4 and 8 bits.

weight_packed     int32 [N, K * bits / 32]       packed along K, in order, offset to be unsigned
weight_scale      float [N, groups]
weight_zero_point int32 [N * bits / 32, groups]  packed along N, offset likewise; asymmetric only
weight_g_idx      int32 [K]                      each row's group, under actorder
weight_shape      int   [2]                      N, K
w = (q - zero) * scale
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
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


class CompressedTensorsReader:
    """Reads pack-quantized modules."""

    marker = "weight_packed"

    def read(self, files: TensorFiles, run: LinearRun, scheme: ModuleScheme) -> PackedRun:
        """See PackedReader."""
        _check_shape(files, run)
        per_word = 32 // scheme.bits
        words = files.integers(
            f"{run.module}.weight_packed",
            (run.n, -(-run.k // per_word)),
            run.columns,
            covering(run.rows, per_word),
        )
        groups, index = _groups(files, run, scheme)
        scales = files.floats(
            f"{run.module}.weight_scale", (run.n, groups.total), run.columns, groups.rows
        ).t()
        return PackedRun(
            bits=scheme.bits,
            words=rows_from(words.t(), scheme.bits, run.rows),
            scales=scales,
            zeros=_zeros(files, run, scheme, groups, scales),
            rows=len(run.rows),
            group_size=groups.size,
            first_group_offset=groups.first_offset,
            group_index=index,
        )


def _check_shape(files: TensorFiles, run: LinearRun) -> None:
    name = f"{run.module}.weight_shape"
    stored = files.sizes(name).tolist()
    if stored != [run.n, run.k]:
        raise CheckpointError(f"Tensor {name} says {stored}; the config implies {[run.n, run.k]}.")


def _groups(
    files: TensorFiles, run: LinearRun, scheme: ModuleScheme
) -> tuple[Groups, Tensor | None]:
    plain = Groups.of(run, scheme, whole=False)
    name = f"{run.module}.weight_g_idx"
    if name not in files:
        return plain, None
    index = checked_index(files.integers(name, (run.k,), run.rows), plain, run, name)
    return (plain if index is None else Groups.of(run, scheme, whole=True)), index


def _zeros(
    files: TensorFiles, run: LinearRun, scheme: ModuleScheme, groups: Groups, scales: Tensor
) -> Tensor:
    name, bits = f"{run.module}.weight_zero_point", scheme.bits
    if scheme.sym:
        if name in files:
            raise CheckpointError(f"{run.module} has zero points; the config says it is symmetric.")
        return torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
    per_word = 32 // bits
    stored = files.integers(
        name,
        (-(-run.n // per_word), groups.total),
        covering(run.columns, per_word),
        groups.rows,
    )
    skip = run.columns.start % per_word
    return unpack_rows(stored, bits)[skip : skip + len(run.columns)].t()
