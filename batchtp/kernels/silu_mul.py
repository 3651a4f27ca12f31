# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gate of the MLP.

    y[t, i] = silu(gate[t, i]) * up[t, i]        silu(a) = a / (1 + exp(-a))

gate_up [T, 2 I] holds gate, then up, along its rows; y [T, I]. Computed in float32.
Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from batchtp.errors import KernelInputError
from batchtp.kernels.checks import check_tensor
from batchtp.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl

# Eight values a thread of four warps (H200, not tuned).
_BLOCK_I = 1024


def reference(gate_up: Tensor) -> Tensor:
    """y in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


@kernel
def _silu_mul(gate_up_ptr, y_ptr, width, stride, BLOCK_I: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_t * stride + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0).to(tl.float32)
    b_up = tl.load(p_gate + width, mask=m_i, other=0).to(tl.float32)
    b_y = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(y_ptr + i_t * width + o_i, b_y.to(y_ptr.dtype.element_ty), mask=m_i)


def launch(gate_up: Tensor) -> Tensor:
    """y by the kernel. Raises KernelInputError for another shape or dtype."""
    check_tensor("gate_up", gate_up, (None, None), gate_up)
    rows, both = gate_up.shape
    if both % 2:
        raise KernelInputError(f"gate_up has rows of {both}; gate and up must be equally wide.")
    width = both // 2
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (rows, -(-width // _BLOCK_I))
        _silu_mul[grid](
            gate_up,
            y,
            width,
            gate_up.stride(0),
            BLOCK_I=_BLOCK_I,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return y
