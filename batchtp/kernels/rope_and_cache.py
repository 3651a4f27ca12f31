# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary embedding of a step's queries and keys, and its keys and values into the paged cache.

    (a, b) = halves of x[t, h, :]        (c, s) = halves of cos_sin[positions[t], :]
    rotated = (a c - b s, b c + a s)
    k_cache[slots[t]] = rotated k[t]     v_cache[slots[t]] = v[t]     result: rotated q

q [T, Hq, D]; k, v [T, Hkv, D]; positions, slots int64 [T]; cos_sin float32 [positions, D]; caches
[blocks, block_size, Hkv, D], a slot being block * block_size + row. D is even. Hq or Hkv may be 0.
Computed in float32. Su et al., RoFormer, 2021, in the layout of GPT-NeoX (halves, not pairs).
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


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """The rotated q, and the caches written in place, in torch."""
    table = cos_sin[positions][:, None, :]
    rows = (k_cache.shape[0] * k_cache.shape[1], *k_cache.shape[2:])
    k_cache.view(rows)[slots] = _rotate(k, table)
    v_cache.view(rows)[slots] = v
    return _rotate(q, table)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


@kernel
def _rope_and_cache(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    out_ptr,
    q_heads,
    block_size,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kb,
    stride_kr,
    stride_kg,
    stride_vb,
    stride_vr,
    stride_vg,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < HALF
    p_table = cos_sin_ptr + tl.load(positions_ptr + i_t) * (2 * HALF) + o_d
    b_cos = tl.load(p_table, mask=m_d, other=0)
    b_sin = tl.load(p_table + HALF, mask=m_d, other=0)
    if i_h < q_heads:
        p_x = q_ptr + i_t * stride_qt + i_h * stride_qh + o_d
        p_y = out_ptr + (i_t * q_heads + i_h) * (2 * HALF) + o_d
    else:
        i_g = i_h - q_heads
        slot = tl.load(slots_ptr + i_t)
        i_b, i_r = slot // block_size, slot % block_size
        p_x = k_ptr + i_t * stride_kt + i_g * stride_kh + o_d
        p_y = k_cache_ptr + i_b * stride_kb + i_r * stride_kr + i_g * stride_kg + o_d
        p_v = v_ptr + i_t * stride_vt + i_g * stride_vh + o_d
        p_stored = v_cache_ptr + i_b * stride_vb + i_r * stride_vr + i_g * stride_vg + o_d
        tl.store(p_stored, tl.load(p_v, mask=m_d, other=0), mask=m_d)
        tl.store(p_stored + HALF, tl.load(p_v + HALF, mask=m_d, other=0), mask=m_d)
    b_first = tl.load(p_x, mask=m_d, other=0).to(tl.float32)
    b_second = tl.load(p_x + HALF, mask=m_d, other=0).to(tl.float32)
    element = out_ptr.dtype.element_ty
    tl.store(p_y, (b_first * b_cos - b_second * b_sin).to(element), mask=m_d)
    tl.store(p_y + HALF, (b_second * b_cos + b_first * b_sin).to(element), mask=m_d)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """The rotated q, and the caches written in place, by the kernel.

    Raises KernelInputError for other shapes, dtypes or devices than the file's docstring names.
    """
    check_tensor("q", q, (None, None, None), q)
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1] if k.dim() == 3 else 0
    same = (q.dtype,)
    check_tensor("k", k, (tokens, None, dim), q, same)
    check_tensor("v", v, (tokens, kv_heads, dim), q, same)
    check_tensor("k_cache", k_cache, (None, None, kv_heads, dim), q, same)
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), q, same)
    check_tensor("positions", positions, (tokens,), q, (torch.int64,))
    check_tensor("slots", slots, (tokens,), q, (torch.int64,))
    check_tensor("cos_sin", cos_sin, (None, dim), q, (torch.float32,))
    if dim % 2 or not cos_sin.is_contiguous():
        raise KernelInputError(f"head_dim {dim} must be even, and cos_sin contiguous.")
    rotated = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not tokens or not q_heads + kv_heads:
        return rotated
    _rope_and_cache[(tokens, q_heads + kv_heads)](
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        rotated,
        q_heads,
        k_cache.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HALF=dim // 2,
        BLOCK=next_power_of_2(dim // 2),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return rotated
