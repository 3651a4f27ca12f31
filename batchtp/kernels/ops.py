"""The one door to the kernels: Triton for CUDA tensors, the torch reference for CPU tensors.

`BATCHTP_KERNELS=triton` with `TRITON_INTERPRET=1` sends CPU tensors through Triton's interpreter:
slow, for tests, and not for bfloat16, whose products it gets wrong. Triton is imported when a
kernel is first launched, so a CPU rank never loads it.
"""

from __future__ import annotations

from torch import Tensor

import batchtp.kernels.int4_matmul as _int4_matmul
import batchtp.kernels.paged_attention as _paged_attention
import batchtp.kernels.rms_norm as _rms_norm
import batchtp.kernels.rope_and_cache as _rope_and_cache
import batchtp.kernels.silu_mul as _silu_mul
from batchtp.kernels.dispatch import uses_triton
from batchtp.kernels.linear import linear, pack_for_device, prepare
from batchtp.kernels.weights import Int4Weight

__all__ = [
    "int4_matmul",
    "linear",
    "pack_for_device",
    "paged_attention",
    "prepare",
    "rms_norm",
    "rope_and_cache",
    "silu_mul",
    "uses_triton",
]


def int4_matmul(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """y = x W (+ b): [M, K] to [M, N] in x's dtype, accumulated in float32.

    Unpacks the weight in every call; `prepare` does it once for `linear`.
    """
    if uses_triton(x):
        return _int4_matmul.launch(x, weight, bias)
    return _int4_matmul.reference(x, weight, bias)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x (+ residual), and that sum: both [T, H]."""
    run = _rms_norm.launch if uses_triton(x) else _rms_norm.reference
    return run(x, weight, eps, residual)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] to [T, I]."""
    run = _silu_mul.launch if uses_triton(gate_up) else _silu_mul.reference
    return run(gate_up)


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
    run = _rope_and_cache.launch if uses_triton(q) else _rope_and_cache.reference
    return run(q, k, v, positions, cos_sin, k_cache, v_cache, slots)


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
    run = _paged_attention.launch if uses_triton(q) else _paged_attention.reference
    return run(
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
