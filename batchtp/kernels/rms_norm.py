# mypy: allow-untyped-defs, allow-incomplete-defs
"""Root-mean-square norm, with the residual stream's sum before it.

    s[t, :] = x[t, :] + residual[t, :]                     rounded to x's dtype
    y[t, h] = s[t, h] / sqrt(mean_h(s[t, h]^2) + eps) * weight[h]

x, residual, s, y [T, H]; weight [H]. Computed in float32. H up to 65,536: a program holds a row.
Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchtp.errors import KernelInputError
from batchtp.kernels.checks import check_tensor, next_power_of_2
from batchtp.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl

_MAX_H = 65_536
# A warp's 32 lanes hold 16 values each (H200, not tuned).
_VALUES_PER_WARP = 512


def reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s) in torch."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype), total


@kernel
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    eps,
    stride_x,
    stride_residual,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < H
    b_total = tl.load(x_ptr + i_t * stride_x + o_h, mask=m_h, other=0)
    if HAS_RESIDUAL:
        b_residual = tl.load(residual_ptr + i_t * stride_residual + o_h, mask=m_h, other=0)
        b_sum = b_total.to(tl.float32) + b_residual.to(tl.float32)
        b_total = b_sum.to(b_total.dtype)
        tl.store(total_ptr + i_t * H + o_h, b_total, mask=m_h)
    b_wide = b_total.to(tl.float32)
    b_inverse = 1.0 / tl.sqrt(tl.sum(b_wide * b_wide, 0) / H + eps)
    b_weight = tl.load(weight_ptr + o_h, mask=m_h, other=0).to(tl.float32)
    b_y = b_wide * b_inverse * b_weight
    tl.store(y_ptr + i_t * H + o_h, b_y.to(y_ptr.dtype.element_ty), mask=m_h)


def launch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, s) by the kernel; s is x itself where there is no residual.

    Raises KernelInputError for other shapes, dtypes or devices than the file's docstring names.
    """
    check_tensor("x", x, (None, None), x)
    rows, width = x.shape
    check_tensor("weight", weight, (width,), x)
    if residual is not None:
        check_tensor("residual", residual, (rows, width), x, (x.dtype,))
    if width > _MAX_H:
        raise KernelInputError(f"x has rows of {width}; a program holds at most {_MAX_H}.")
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    if not y.numel():
        return y, total
    block = next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        y,
        total,
        eps,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        H=width,
        BLOCK_H=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // _VALUES_PER_WARP)),
        enable_fp_fusion=True,
    )
    return y, total
