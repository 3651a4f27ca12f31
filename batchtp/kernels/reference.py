"""Torch references of every kernel: what each computes, and the path taken on a CPU.

What a kernel computes in float32 is computed so here too; results have the inputs' dtype.
T: tokens of a step. H: hidden. D: head_dim. S: sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchtp.kernels.weights import Int4Weight, dequantize

# Sequences that decode are attended to together, padded to the longest; this bounds the padding's
# memory, in elements of one gathered K or V.
_MOST_GATHERED = 1 << 26


def int4_matmul(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """y = x W (+ b): [M, K] to [M, N], accumulated in float32."""
    y = x.float() @ dequantize(weight)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """s = x + residual; y = s / sqrt(mean(s^2) + eps) * weight. Gives (y, s), both [T, H]."""
    total = x if residual is None else x + residual
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] to [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


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
    """Rotate q and k by their positions, put k and v into the cache at `slots`; gives rotated q.

    q [T, Hq, D], k and v [T, Hkv, D]; caches [blocks, block_size, Hkv, D], written in place.
    """
    table = cos_sin[positions][:, None, :]
    k_cache.view(-1, *k_cache.shape[2:])[slots] = _rotate(k, table)
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v
    return _rotate(q, table)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


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
    """Causal attention over the paged cache, prefill and decode mixed: [T, Hq, D].

    A sequence's queries are its last tokens. Local q head h reads kv head
    (h + first_q) // q_per_kv.
    """
    heads = (torch.arange(q.shape[1], device=q.device) + first_q) // q_per_kv
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    out = torch.empty_like(q)
    decoding = [s for s in range(len(lengths)) if starts[s + 1] - starts[s] == 1]
    for group in _groups(decoding, lengths, q[0].numel() if len(q) else 1):
        rows = torch.tensor([starts[s] for s in group], device=q.device)
        index = torch.tensor(group, device=q.device)
        longest = max(lengths[s] for s in group)
        k, v = (_gather(c, block_tables[index], longest, heads) for c in (k_cache, v_cache))
        at = torch.arange(longest, device=q.device)
        ends = context_lens[index, None]
        mask = at < ends
        if lengths[group[0]] != longest:
            # Rows past a sequence's end are nobody's: they may hold NaN, which a mask lets through.
            past = ~mask[:, None, :, None]
            k, v = k.masked_fill(past, 0), v.masked_fill(past, 0)
        if sliding_window:
            mask &= at >= ends - sliding_window
        y = F.scaled_dot_product_attention(
            q[rows].unsqueeze(2), k, v, attn_mask=mask[:, None, None, :], scale=scale
        )
        out[rows] = y.squeeze(2)
    for s in set(range(len(lengths))) - set(decoding):
        span = slice(starts[s], starts[s + 1])
        k, v = (_gather(c, block_tables[s : s + 1], lengths[s], heads) for c in (k_cache, v_cache))
        mask = _causal(starts[s + 1] - starts[s], lengths[s], sliding_window, q.device)
        y = F.scaled_dot_product_attention(
            q[span].transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale
        )
        out[span] = y[0].transpose(0, 1)
    return out


def _groups(decoding: list[int], lengths: list[int], row: int) -> list[list[int]]:
    """Runs of decoding sequences of like length, each within the bound on padded elements."""
    groups: list[list[int]] = []
    for s in sorted(decoding, key=lambda s: lengths[s]):
        if not groups or (len(groups[-1]) + 1) * lengths[s] * row > _MOST_GATHERED:
            groups.append([])
        groups[-1].append(s)
    return groups


def _gather(cache: Tensor, tables: Tensor, length: int, heads: Tensor) -> Tensor:
    """The first `length` rows of each sequence, one copy a q head: [S, Hq, length, D]."""
    blocks = -(-length // cache.shape[1])
    rows = cache[tables[:, :blocks].long()].flatten(1, 2)[:, :length]
    return rows[:, :, heads].transpose(1, 2)


def _causal(queries: int, length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    last = torch.arange(length - queries, length, device=device)[:, None]
    mask = at <= last
    return mask & (at > last - window) if window else mask
