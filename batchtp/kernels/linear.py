"""A linear's weight in the form that its device runs best, made once at load.

    device            weight          runs as
    cuda              int4            the Triton int4 matmul, packed for it
    cpu, float32/16   int4            dense: dequantised once (see below)
    cpu, bfloat16     int4            aten's int4 op up to 8 rows, dense above; else dense, as also
                                      on CPUs without bfloat16 instructions
    any               dense           the library's matmul

On a CPU an int4 product in torch would dequantise the weight in every step. Memory is cheaper than
that, so the weight is dequantised once; float32 is exact for float16 scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from batchtp.kernels import int4_matmul
from batchtp.kernels.dispatch import uses_triton
from batchtp.kernels.flat import Stored
from batchtp.kernels.packed import PackedInt4, check_weight, pack
from batchtp.kernels.weights import Int4Weight, ZeroKind, dequantize, unpack

# From about 16 rows a bfloat16 linear is as fast as aten's int4 op (2 cores, measured).
_INT4_OP_ROWS = 8


@dataclass(frozen=True, slots=True)
class CpuInt4:
    """A weight packed for aten's CPU int4 op, beside its dense form for many rows."""

    packed: Tensor
    scales_and_zeros: Tensor
    group_size: int
    dense: Tensor


Prepared: TypeAlias = Tensor | PackedInt4 | CpuInt4


def pack_for_device(weight: Stored) -> Stored:
    """The weight in the kernel's layout where a kernel will run it, else as it is.

    Raises KernelInputError where an int4 weight's tensors do not fit together.
    """
    if isinstance(weight, Int4Weight) and uses_triton(weight.qweight):
        return pack(weight)
    return weight


def prepare(weight: Stored, dtype: torch.dtype) -> Prepared:
    """The form that `linear` takes. A dense weight is [N, K], as torch's own linears have it.

    Raises KernelInputError where an int4 weight's tensors do not fit together.
    """
    weight = pack_for_device(weight)
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, PackedInt4):
        return weight
    check_weight(weight)
    dense = dequantize(weight, dtype).t().contiguous()
    if dtype is torch.bfloat16 and _has_bfloat16() and fits_cpu_op(weight):
        return _pack_for_cpu(weight, dense)
    return dense


def linear(x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
    """[M, K] to [M, N]."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, CpuInt4):
        return _cpu_linear(x, weight, bias)
    return int4_matmul.launch(x, weight, bias)


def fits_cpu_op(weight: Int4Weight) -> bool:
    """Whether aten's CPU int4 op computes this weight: whole groups of a size it knows."""
    return (
        weight.group_index is None
        and weight.first_group_offset == 0
        and weight.group_size in (32, 64, 128, 256)
        and weight.k % weight.group_size == 0
        and weight.n % 16 == 0
    )


def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


def _pack_for_cpu(weight: Int4Weight, dense: Tensor) -> CpuInt4:
    """aten's form is w = (q - 8) * scale + zero, with [K / g, N, 2] scales and zeros."""
    scales = weight.scales.float()
    zeros = weight.zeros.float()
    integer = weight.zero_kind is ZeroKind.INTEGER
    shift = (8 - zeros) * scales if integer else zeros + 8 * scales
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        unpack(weight).t().contiguous().to(torch.int32), 1
    )
    both = torch.stack((scales, shift), dim=-1).to(torch.bfloat16).contiguous()
    return CpuInt4(packed, both, weight.group_size, dense)


def _cpu_linear(x: Tensor, weight: CpuInt4, bias: Tensor | None) -> Tensor:
    if x.shape[0] > _INT4_OP_ROWS:
        return F.linear(x, weight.dense, bias)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), weight.packed, weight.group_size, weight.scales_and_zeros
    )
    return y if bias is None else y + bias
