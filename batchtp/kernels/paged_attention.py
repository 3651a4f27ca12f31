# mypy: allow-untyped-defs, allow-incomplete-defs
"""Causal attention over the paged cache, prefill and decode mixed.

    y[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g]) v[j, g]      g = (h + first_q) // q_per_kv
    over the tokens j of t's sequence with  position(t) - window < j <= position(t)

q, y [T, Hq, D]; caches [blocks, block_size, Hkv, D]; block_tables int32 [S, most blocks];
query_starts int32 [S + 1]; context_lens int32 [S], tokens in the cache with this step's. A
sequence's queries are its last tokens. D up to 256, masked to a power of two; window 0: none.

Online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022) in float32. A program takes one kv
head and some tokens of one sequence, all q heads of that kv head as rows of one product. Keys are
taken in segments of fixed length that are merged in order: a segment a program and a second kernel
(decode of few sequences), or all by one program. Both do the same arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchtp.errors import KernelInputError
from batchtp.kernels.checks import check_tensor, next_power_of_2
from batchtp.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl

# Sequences that decode are attended to together, padded to the longest; this bounds the padding's
# memory, in elements of one gathered K or V.
_MOST_GATHERED = 1 << 26
# A short sequence is not padded to more than this times its length: one long neighbour of nine
# short ones made a step twelve times slower.
_MOST_STRETCH = 2


def reference(
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
    """y in torch: decoding sequences together, padded; others one by one."""
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    out = torch.empty_like(q)
    decoding = [s for s in range(len(lengths)) if starts[s + 1] - starts[s] == 1]
    for group in _groups(decoding, lengths, k_cache[0, 0].numel() if len(k_cache) else 1):
        rows = torch.tensor([starts[s] for s in group], device=q.device)
        index = torch.tensor(group, device=q.device)
        ends = [lengths[s] for s in group]
        out[rows] = _decode(
            q[rows],
            _gather(k_cache, block_tables[index], ends),
            _gather(v_cache, block_tables[index], ends),
            context_lens[index, None],
            scale,
            q_per_kv,
            first_q,
            sliding_window,
        )
    heads = (torch.arange(q.shape[1], device=q.device) + first_q) // q_per_kv
    for s in sorted(set(range(len(lengths))) - set(decoding)):
        span, table = slice(starts[s], starts[s + 1]), block_tables[s : s + 1]
        k, v = (_gather(c, table, [lengths[s]])[:, heads] for c in (k_cache, v_cache))
        mask = _causal(starts[s + 1] - starts[s], lengths[s], sliding_window, q.device)
        y = F.scaled_dot_product_attention(
            q[span].transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale
        )
        out[span] = y[0].transpose(0, 1)
    return out


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    scale: float,
    q_per_kv: int,
    first_q: int,
    window: int,
) -> Tensor:
    """One query a sequence [S, Hq, D]; all q heads of a kv head in one product over its keys."""
    sequences, q_heads, dim = q.shape
    kv_heads, longest = k.shape[1:3]
    padded = q.new_zeros((sequences, kv_heads * q_per_kv, dim))
    own = slice(first_q, first_q + q_heads)
    padded[:, own] = q
    at = torch.arange(longest, device=q.device)
    mask = at < ends
    if window:
        mask &= at >= ends - window
    y = F.scaled_dot_product_attention(
        padded.view(sequences, kv_heads, q_per_kv, dim),
        k,
        v,
        attn_mask=mask[:, None, None, :],
        scale=scale,
    )
    return y.reshape(padded.shape)[:, own]


def _groups(decoding: list[int], lengths: list[int], row: int) -> list[list[int]]:
    """Runs of decoding sequences of like length, each within the bound on padded elements."""
    groups: list[list[int]] = []
    for s in sorted(decoding, key=lambda s: lengths[s]):
        full = groups and (len(groups[-1]) + 1) * lengths[s] * row > _MOST_GATHERED
        if not groups or full or lengths[s] > _MOST_STRETCH * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(s)
    return groups


def _gather(cache: Tensor, tables: Tensor, lengths: list[int]) -> Tensor:
    """Each sequence's rows, padded with zeros to the longest: [S, Hkv, longest, D]."""
    size, longest = cache.shape[1], max(lengths)
    blocks = tables[:, : -(-longest // size)].flatten()
    rows = cache.index_select(0, blocks).view(len(lengths), -1, *cache.shape[2:])
    # Rows past a sequence's end are nobody's: they may hold NaN, which a mask lets through.
    for row, length in zip(rows, lengths, strict=True):
        row[length:].zero_()
    return rows[:, :longest].transpose(1, 2)


def _causal(queries: int, length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    last = torch.arange(length - queries, length, device=device)[:, None]
    mask = at <= last
    return mask & (at > last - window) if window else mask


_MAX_D = 256
# Keys that one program of a split decode takes. Fixed: with it a row's result is too.
_SEGMENT = 512
# Twice the SMs of an H200: with so many programs segments need none of their own.
_ENOUGH_PROGRAMS = 264
# The tensor cores' least rows.
_LEAST_ROWS = 16


class Tile(NamedTuple):
    """Rows (queries times q heads of a kv head) and keys that a program holds."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(decode: bool, q_per_kv: int, dim: int, dtype: torch.dtype) -> Tile:
    """Sizes for an H200's registers and shared memory (228 KiB); not tuned.

    Keys in a tile follow from dtype and head_dim alone: with them a row's result does not change
    between prefill and decode.
    """
    wide = next_power_of_2(dim) > 128
    single = dtype is torch.float32
    rows = max(_LEAST_ROWS, next_power_of_2(q_per_kv))
    if single:
        # No tensor cores: float32 means float32, and whole tiles live in registers.
        return Tile(rows, block_n=16, warps=4, stages=1)
    return Tile(
        rows if decode else max(rows, 64),
        block_n=32 if wide else 64,
        warps=8 if wide and not decode else 4,
        stages=2,
    )


@kernel
def _find_sequence(starts_ptr, i_tile, sequences, BLOCK_Q: tl.constexpr, SPARE: tl.constexpr):
    # The last sequence s with starts[s] // BLOCK_Q + s * SPARE <= i_tile. One spare tile a sequence
    # is room for its last, partly filled one, without the host knowing the lengths.
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle * SPARE <= i_tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel
def _attend_segment(
    b_q,
    k_ptr,
    v_ptr,
    p_table,
    o_position,
    first,
    last,
    block_size,
    stride_kb,
    stride_kr,
    stride_vb,
    stride_vr,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for n0 in range(first, last, BLOCK_N):
        o_n = n0 + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        i_b = tl.load(p_table + o_n // block_size, mask=m_n, other=0).to(tl.int64)
        i_r = o_n % block_size
        p_k = k_ptr + i_b * stride_kb + i_r * stride_kr
        p_v = v_ptr + i_b * stride_vb + i_r * stride_vr
        b_k = tl.load(p_k[None, :] + o_d[:, None], mask=m_n[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(p_v[:, None] + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
        m_s = (o_n[None, :] <= o_position[:, None]) & m_n[None, :]
        if WINDOW > 0:
            m_s = m_s & (o_n[None, :] > o_position[:, None] - WINDOW)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that sees none of the keys so far has no maximum; any finite one gives it zeros.
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = b_acc * b_old[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_max = b_new
    return b_acc, b_max, b_sum


@kernel
def _paged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    maxima_ptr,
    sums_ptr,
    scale_log2,
    sequences,
    q_heads,
    first_q,
    block_size,
    segments,
    stride_table,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kr,
    stride_kg,
    stride_vb,
    stride_vr,
    stride_vg,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    i_g = tl.program_id(1)
    i_tile = tl.program_id(0)
    i_s = _find_sequence(starts_ptr, i_tile, sequences, BLOCK_Q, 1)
    start = tl.load(starts_ptr + i_s)
    queries = tl.load(starts_ptr + i_s + 1) - start
    first_query = (i_tile - (start // BLOCK_Q + i_s)) * BLOCK_Q
    before = tl.load(lengths_ptr + i_s) - queries
    end = before + tl.minimum(first_query + BLOCK_Q, queries)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before + first_query - WINDOW + 1, 0)
    if first_query < queries:
        o_row = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_q = first_query + o_row // HEADS
        o_h = i_g * Q_PER_KV - first_q + o_row % HEADS
        m_row = (o_q < queries) & (o_row % HEADS < Q_PER_KV) & (o_h >= 0) & (o_h < q_heads)
        m_q = m_row[:, None] & (o_d < D)[None, :]
        o_t = (start + o_q).to(tl.int64)
        p_q = q_ptr + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :]
        b_q = tl.load(p_q, mask=m_q, other=0.0)
        first_segment = begin // SEGMENT
        last_segment = (end + SEGMENT - 1) // SEGMENT
        if SPLIT:
            first_segment = tl.maximum(first_segment, tl.program_id(2))
            last_segment = tl.minimum(last_segment, tl.program_id(2) + 1)
        b_top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        b_total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        b_y = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for i_segment in range(first_segment, last_segment):
            first = tl.maximum(i_segment * SEGMENT, begin // BLOCK_N * BLOCK_N)
            b_acc, b_max, b_sum = _attend_segment(
                b_q,
                k_ptr + i_g * stride_kg,
                v_ptr + i_g * stride_vg,
                tables_ptr + i_s.to(tl.int64) * stride_table,
                before + o_q,
                first,
                tl.minimum((i_segment + 1) * SEGMENT, end),
                block_size,
                stride_kb,
                stride_kr,
                stride_vb,
                stride_vr,
                scale_log2,
                D,
                BLOCK_D,
                BLOCK_M,
                BLOCK_N,
                WINDOW,
            )
            b_new = tl.maximum(b_top, b_max)
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_old, b_more = tl.exp2(b_top - b_safe), tl.exp2(b_max - b_safe)
            b_total = b_total * b_old + b_sum * b_more
            b_y = b_y * b_old[:, None] + b_acc * b_more[:, None]
            b_top = b_new
        if SPLIT:
            if first_segment < last_segment:
                o_part = (o_t * q_heads + o_h) * segments + first_segment
                tl.store(maxima_ptr + o_part, b_top, mask=m_row)
                tl.store(sums_ptr + o_part, b_total, mask=m_row)
                tl.store(out_ptr + o_part[:, None] * D + o_d[None, :], b_y, mask=m_q)
        else:
            # Rows that are no query may have seen no key.
            b_y = b_y / tl.where(b_total > 0, b_total, 1.0)[:, None]
            p_y = out_ptr + ((o_t * q_heads + o_h) * D)[:, None] + o_d[None, :]
            tl.store(p_y, b_y.to(out_ptr.dtype.element_ty), mask=m_q)


@kernel
def _merge_segments(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    sequences,
    q_heads,
    segments,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    i_t = tl.program_id(0)
    i_s = _find_sequence(starts_ptr, i_t, sequences, 1, 0)
    queries = tl.load(starts_ptr + i_s + 1) - tl.load(starts_ptr + i_s)
    position = tl.load(lengths_ptr + i_s) - queries + i_t - tl.load(starts_ptr + i_s)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_row = (i_t.to(tl.int64) * q_heads + tl.program_id(1)) * segments
    first_segment = 0
    if WINDOW > 0:
        first_segment = tl.maximum(position - WINDOW + 1, 0) // SEGMENT
    b_y = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = 0.0
    top = float("-inf")
    for i in range(first_segment, position // SEGMENT + 1):
        b_acc = tl.load(parts_ptr + (o_row + i) * D + o_d, mask=m_d, other=0.0)
        maximum = tl.load(maxima_ptr + o_row + i)
        new = tl.maximum(top, maximum)
        old, more = tl.exp2(top - new), tl.exp2(maximum - new)
        total = total * old + tl.load(sums_ptr + o_row + i) * more
        b_y = b_y * old + b_acc * more
        top = new
    p_y = out_ptr + (i_t.to(tl.int64) * q_heads + tl.program_id(1)) * D + o_d
    tl.store(p_y, (b_y / total).to(out_ptr.dtype.element_ty), mask=m_d)


def launch(
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
    *,
    split: bool | None = None,
) -> Tensor:
    """y by the kernel. `split` overrides whether segments of keys get programs of their own.

    Raises KernelInputError for other shapes, dtypes or devices than the file's docstring names.
    """
    _check(q, k_cache, v_cache, block_tables, query_starts, context_lens, q_per_kv, first_q)
    tokens, q_heads, dim = q.shape
    sequences, kv_heads = context_lens.shape[0], k_cache.shape[2]
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not out.numel() or not sequences:
        return out
    tile = tile_for(tokens == sequences, q_per_kv, dim, q.dtype)
    heads = next_power_of_2(q_per_kv)
    tiles = tokens // (tile.block_m // heads) + sequences
    segments = -(-block_tables.shape[1] * k_cache.shape[1] // _SEGMENT)
    if split is None:
        decode = tokens == sequences
        split = decode and segments > 1 and sequences * kv_heads < _ENOUGH_PROGRAMS
    y, parts = out, (out, out)
    if split:
        shape = (tokens, q_heads, segments)
        y = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        parts = (y.new_empty(shape), y.new_empty(shape))
    _paged_attention[(tiles, kv_heads, segments if split else 1)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        context_lens,
        y,
        *parts,
        scale * math.log2(math.e),
        sequences,
        q_heads,
        first_q,
        k_cache.shape[1],
        segments,
        block_tables.stride(0),
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        D=dim,
        BLOCK_D=max(_LEAST_ROWS, next_power_of_2(dim)),
        Q_PER_KV=q_per_kv,
        HEADS=heads,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SEGMENT=_SEGMENT,
        WINDOW=sliding_window,
        SPLIT=split,
        num_warps=tile.warps,
        enable_fp_fusion=True,
        num_stages=tile.stages,
    )
    if split:
        _merge_segments[(tokens, q_heads)](
            y,
            *parts,
            query_starts,
            context_lens,
            out,
            sequences,
            q_heads,
            segments,
            D=dim,
            BLOCK_D=next_power_of_2(dim),
            SEGMENT=_SEGMENT,
            WINDOW=sliding_window,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    q_per_kv: int,
    first_q: int,
) -> None:
    check_tensor("q", q, (None, None, None), q)
    _, q_heads, dim = q.shape
    check_tensor("k_cache", k_cache, (None, None, None, dim), q, (q.dtype,))
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), q, (q.dtype,))
    check_tensor("context_lens", context_lens, (None,), q, (torch.int32,))
    sequences = context_lens.shape[0]
    check_tensor("query_starts", query_starts, (sequences + 1,), q, (torch.int32,))
    check_tensor("block_tables", block_tables, (sequences, None), q, (torch.int32,))
    if dim > _MAX_D:
        raise KernelInputError(f"head_dim {dim} is above {_MAX_D}.")
    if q_per_kv < 1 or first_q < 0 or q_heads + first_q > k_cache.shape[2] * q_per_kv:
        raise KernelInputError(
            f"{q_heads} q heads from {first_q} need more than the {k_cache.shape[2]} kv heads of "
            f"{q_per_kv} q heads each that the cache has."
        )
