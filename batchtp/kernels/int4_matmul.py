# mypy: allow-untyped-defs, allow-incomplete-defs
"""Matrix product with an int4 weight.

    y[m, n] = sum_k x[m, k] w[k, n] (+ bias[n])          w as kernels/weights.py defines it

x [M, K] float16, bfloat16 or float32; y [M, N] in x's dtype; accumulated in float32. Any M, N, K.
Where a run of slices shares its groups (kernels/packed.py), the tensor cores multiply exact small
integers and the group's scale is applied to the float32 sum, so the weight is not rounded at all:

    INTEGER    y = sum over runs  s[g, n] * sum_k x[m, k] (q[k, n] - z[g, n])
    MINIMUM    y = sum over runs  s[g, n] * sum_k x[m, k] q[k, n] + z[g, n] * sum_k x[m, k]

Else every weight is computed in float32 and rounded once to x's dtype. The product is computed
transposed, weights on the left: only the left operand of Hopper's wgmma comes from registers.

Deterministic: no atomics. K is split into shares of the weight's own, whatever M is; a share a
program and a second kernel that adds them in order, or one program that adds them in the same
order. The tile over K is fixed too, so neither changes a row's result with the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from batchtp.errors import KernelInputError
from batchtp.kernels.checks import check_tensor
from batchtp.kernels.jit import kernel
from batchtp.kernels.packed import SLICE_ROWS, TILE_ROWS, PackedInt4, pack
from batchtp.kernels.weights import Int4Weight, ZeroKind, dequantize

if TYPE_CHECKING:
    import triton.language as tl


def reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """y in torch: the weight is dequantised to float32 first."""
    y = x.float() @ dequantize(weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


class Tile(NamedTuple):
    """What a program computes, for up to `rows` rows of x."""

    rows: int
    block_n: int
    block_m: int
    warps: int
    stages: int


_ANY = 1 << 62
# Chosen for an H200 by sizes and occupancy; not tuned.
_TILES_16_BIT = (
    Tile(16, block_n=64, block_m=16, warps=4, stages=4),
    Tile(32, block_n=64, block_m=32, warps=4, stages=3),
    Tile(64, block_n=128, block_m=64, warps=8, stages=3),
    Tile(_ANY, block_n=128, block_m=128, warps=8, stages=2),
)
# No tensor cores: float32 means float32.
_TILES_32_BIT = (
    Tile(16, block_n=64, block_m=16, warps=4, stages=1),
    Tile(_ANY, block_n=64, block_m=64, warps=8, stages=1),
)
# With this many programs (SMs of an H200) shares of K need no programs of their own.
_ENOUGH_PROGRAMS = 132
_BLOCK_REDUCED = 512


@kernel
def _exact(q, zero, element: tl.constexpr):
    # q - zero for q in 0..15 and zero in 0..16, without the slow conversion from int: the nibble
    # goes into the mantissa of a power of two, and all of it stays exact.
    if element == tl.float16:
        magic = (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        result = magic - (zero + 1024.0).to(tl.float16)[:, None]
    elif element == tl.bfloat16:
        magic = (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        result = magic - (zero + 128.0).to(tl.bfloat16)[:, None]
    else:
        result = q.to(tl.float32) - zero[:, None]
    return result


@kernel
def _add_run(
    b_acc,
    b_words,
    p_x,
    m_m,
    k_left,
    b_scale,
    b_zero,
    r: tl.constexpr,
    RUN: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MINIMUM: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    o_s = tl.arange(0, SLICE)
    element: tl.constexpr = p_x.dtype.element_ty
    b_part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_x_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for i in tl.static_range(r * RUN, (r + 1) * RUN):
        m_x = m_m[None, :]
        if not EVEN_K:
            m_x = m_x & (i * SLICE + o_s < k_left)[:, None]
        b_x = tl.load(p_x + i * SLICE, mask=m_x, other=0.0)
        b_q = (b_words >> (4 * i)) & 15
        if MINIMUM:
            b_w = _exact(b_q, tl.zeros_like(b_zero), element)
            b_x_sum += tl.sum(b_x.to(tl.float32), 0)
        else:
            b_w = _exact(b_q, b_zero, element)
        b_part = tl.dot(b_w, b_x, b_part, input_precision="ieee")
    b_acc += b_part * b_scale[:, None]
    if MINIMUM:
        b_acc += b_zero[:, None] * b_x_sum[None, :]
    return b_acc


@kernel
def _int4_matmul(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    index_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    groups,
    group_size,
    first_group_offset,
    stride_x,
    tiles,
    tiles_per_split,
    splits,
    SLICE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MINIMUM: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TILE: tl.constexpr = 8 * SLICE
    element: tl.constexpr = x_ptr.dtype.element_ty
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_s = tl.arange(0, SLICE)
    m_m, m_n = o_m < M, o_n < N
    i_split = tl.program_id(2)
    last_split = splits
    if SPLIT:
        last_split = i_split + 1
    wide_tile = (i_split * tiles_per_split).to(tl.int64)
    p_x = x_ptr + wide_tile * TILE + o_m.to(tl.int64)[None, :] * stride_x + o_s[:, None]
    p_words = words_ptr + wide_tile * N * SLICE + o_n[:, None] * SLICE + o_s[None, :]
    k0 = i_split * tiles_per_split * TILE
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for i_s in range(i_split, last_split):
        b_acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        first_tile = i_s * tiles_per_split
        for _ in range(first_tile, tl.minimum(first_tile + tiles_per_split, tiles)):
            b_words = tl.load(p_words, mask=m_n[:, None], other=0)
            if RUN > 0:
                for r in tl.static_range(8 // RUN):
                    i_g = (first_group_offset + k0 + r * RUN * SLICE) // group_size
                    o_g = tl.minimum(i_g, groups - 1) * N + o_n
                    b_scale = tl.load(scales_ptr + o_g, mask=m_n, other=0).to(tl.float32)
                    b_zero = tl.load(zeros_ptr + o_g, mask=m_n, other=0).to(tl.float32)
                    b_acc = _add_run(
                        b_acc,
                        b_words,
                        p_x,
                        m_m,
                        K - k0,
                        b_scale,
                        b_zero,
                        r,
                        RUN,
                        SLICE,
                        BLOCK_N,
                        BLOCK_M,
                        MINIMUM,
                        EVEN_K,
                    )
            else:
                for i in tl.static_range(8):
                    o_k = k0 + i * SLICE + o_s
                    if HAS_INDEX:
                        i_g = tl.load(index_ptr + o_k)
                    else:
                        i_g = tl.minimum((first_group_offset + o_k) // group_size, groups - 1)
                    o_g = i_g[None, :] * N + o_n[:, None]
                    b_scale = tl.load(scales_ptr + o_g, mask=m_n[:, None], other=0).to(tl.float32)
                    b_zero = tl.load(zeros_ptr + o_g, mask=m_n[:, None], other=0).to(tl.float32)
                    b_q = ((b_words >> (4 * i)) & 15).to(tl.float32)
                    b_w = b_q * b_scale + b_zero if MINIMUM else (b_q - b_zero) * b_scale
                    m_x = m_m[None, :] & (o_k < K)[:, None]
                    b_x = tl.load(p_x + i * SLICE, mask=m_x, other=0.0)
                    b_acc = tl.dot(b_w.to(element), b_x, b_acc, input_precision="ieee")
            p_x += TILE
            p_words += N * SLICE
            k0 += TILE
        b_y += b_acc
    o_out = o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    m_out = m_m[None, :] & m_n[:, None]
    if SPLIT:
        p_share = out_ptr + i_split.to(tl.int64) * M * N + o_out
        tl.store(p_share, b_y, mask=m_out)
    else:
        if HAS_BIAS:
            b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0).to(tl.float32)[:, None]
        tl.store(out_ptr + o_out, b_y.to(out_ptr.dtype.element_ty), mask=m_out)


@kernel
def _add_shares(
    shares_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_y = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(SPLITS):
        b_y += tl.load(shares_ptr + (i * M + i_m) * N + o_n, mask=m_n, other=0)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0).to(tl.float32)
    tl.store(out_ptr + i_m * N + o_n, b_y.to(out_ptr.dtype.element_ty), mask=m_n)


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """The table's entry for so many rows of x."""
    table = _TILES_32_BIT if dtype is torch.float32 else _TILES_16_BIT
    return next(tile for tile in table if rows <= tile.rows)


def launch(x: Tensor, weight: Int4Weight | PackedInt4, bias: Tensor | None = None) -> Tensor:
    """y by the kernel. An Int4Weight is packed first, in every call: pack it once instead.

    Raises KernelInputError for other shapes, dtypes or devices than the file's docstring names.
    """
    packed = pack(weight) if isinstance(weight, Int4Weight) else weight
    check_tensor("x", x, (None, packed.k), x)
    if bias is not None:
        check_tensor("bias", bias, (packed.n,), x)
    if packed.words.device != x.device:
        raise KernelInputError(f"x is on {x.device}, its int4 weight on {packed.words.device}.")
    rows = x.shape[0]
    out = torch.empty((rows, packed.n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = tile_for(rows, x.dtype)
    columns = (-(-rows // tile.block_m), -(-packed.n // tile.block_n))
    split = packed.splits > 1 and columns[0] * columns[1] < _ENOUGH_PROGRAMS
    if not split:
        _launch_matmul((*columns, 1), tile, x, packed, bias, out, split=False)
        return out
    shares = torch.empty((packed.splits, rows, packed.n), dtype=torch.float32, device=x.device)
    _launch_matmul((*columns, packed.splits), tile, x, packed, None, shares, split=True)
    _add_shares[(rows, -(-packed.n // _BLOCK_REDUCED))](
        shares,
        out if bias is None else bias,
        out,
        rows,
        packed.n,
        SPLITS=packed.splits,
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK_REDUCED,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


def _launch_matmul(
    grid: tuple[int, int, int],
    tile: Tile,
    x: Tensor,
    packed: PackedInt4,
    bias: Tensor | None,
    out: Tensor,
    *,
    split: bool,
) -> None:
    tiles = packed.words.shape[0]
    index = packed.group_index
    _int4_matmul[grid](
        x,
        packed.words,
        packed.scales,
        packed.zeros,
        packed.words if index is None else index,
        out if bias is None else bias,
        out,
        x.shape[0],
        packed.n,
        packed.k,
        packed.scales.shape[0],
        packed.group_size,
        packed.first_group_offset,
        x.stride(0),
        tiles,
        -(-tiles // packed.splits),
        packed.splits,
        SLICE=SLICE_ROWS,
        RUN=packed.run_slices,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        MINIMUM=packed.zero_kind is ZeroKind.MINIMUM,
        EVEN_K=packed.k % TILE_ROWS == 0,
        HAS_INDEX=index is not None,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        num_warps=tile.warps,
        enable_fp_fusion=True,
        num_stages=tile.stages,
    )
