"""The one door to the kernels: Triton for CUDA tensors, the torch reference for CPU tensors.

`BATCHTP_KERNELS=triton` with `TRITON_INTERPRET=1` sends CPU tensors through Triton's interpreter:
slow, for tests. Triton is imported when it is first needed, so a CPU rank never loads it.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchtp.kernels import reference
from batchtp.kernels.linear import linear, prepare
from batchtp.kernels.weights import Int4Weight

__all__ = [
    "int4_matmul",
    "linear",
    "paged_attention",
    "prepare",
    "rms_norm",
    "rope_and_cache",
    "silu_mul",
]


def int4_matmul(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """y = x W (+ b): [M, K] to [M, N] in x's dtype, accumulated in float32."""
    result: Tensor = _backend(x).int4_matmul(x, weight, bias)
    return result


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x (+ residual), and that sum: both [T, H]."""
    result: tuple[Tensor, Tensor] = _backend(x).rms_norm(x, weight, eps, residual)
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] to [T, I]."""
    result: Tensor = _backend(gate_up).silu_mul(gate_up)
    return result


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate q and k, write k and v into the cache in place; the rotated q."""
    result: Tensor = _backend(q).rope_and_cache(
        q, k, v, positions, cos_sin, k_cache, v_cache, slots
    )
    return result


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    q_per_kv: int,
    first_q: int,
    sliding_window: int = 0,
) -> Tensor:
    """Causal attention over the paged cache, prefill and decode mixed: [T, Hq, D]."""
    result: Tensor = _backend(q).paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        context_lens,
        scale,
        q_per_kv,
        first_q,
        sliding_window,
    )
    return result


def _backend(x: Tensor) -> Any:
    if x.is_cuda or _interpreting():
        return _triton()
    return reference


@functools.cache
def _interpreting() -> bool:
    return os.environ.get("BATCHTP_KERNELS") == "triton" and bool(
        int(os.environ.get("TRITON_INTERPRET", "0"))
    )


@functools.cache
def _triton() -> ModuleType:
    from batchtp.kernels import triton_ops

    return triton_ops


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in this dtype here. The interpreter gets bfloat16 wrong."""
    return not (_interpreting() and dtype is torch.bfloat16)
