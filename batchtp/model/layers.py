"""The parts of a decoder layer, each on one rank's share of the heads and features.

T is the tokens of a step, H the hidden size. A rank's share may be empty; its partial sum is then
zero and the all-reduce brings the others'.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels import ops
from batchtp.kernels.flat import Stored

LinearWeight: TypeAlias = Stored | tuple[Stored, ...]
ShardTensors: TypeAlias = MutableMapping[str, LinearWeight]
AllReduce: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's tokens, sequence after sequence, and where their keys and values go.

    tokens, positions, slots: int64 [T]. block_tables: int32 [S, most blocks]. query_starts: int32
    [S + 1], where each sequence's tokens start. context_lens: int32 [S], tokens in the cache once
    this step's are written. sample_rows: int64 [R], the tokens whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    sample_rows: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: [blocks, block_size, kv heads of the rank, head_dim] each."""

    keys: Tensor
    values: Tensor


class Linear:
    """y = x W + b on a column or row shard; several weights side by side give one wide output."""

    def __init__(self, weight: LinearWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        parts = weight if isinstance(weight, tuple) else (weight,)
        self._parts: Sequence[Any] = [ops.prepare(part, dtype) for part in parts]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in features] to [T, out features]."""
        if len(self._parts) == 1:
            return ops.linear(x, self._parts[0], self._bias)
        y = torch.cat([ops.linear(x, part, None) for part in self._parts], dim=-1)
        return y if self._bias is None else y + self._bias


class VocabEmbedding:
    """Token embeddings whose rows are dealt over the ranks."""

    def __init__(self, rows: Tensor, vocab: range, all_reduce: AllReduce | None) -> None:
        self.rows = rows
        self._first = vocab.start
        self._all_reduce = all_reduce

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] ids to [T, H]. `all_reduce` None: this rank has every row."""
        if self._all_reduce is None:
            return self.rows[tokens]
        local = tokens - self._first
        owned = (local >= 0) & (local < self.rows.shape[0])
        x = self.rows.new_zeros((tokens.shape[0], self.rows.shape[1]))
        x[owned] = self.rows[local[owned]]
        return self._all_reduce(x)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The rank's heads. `first_q`: its first q head counted from the first q head of its first kv
    head; `window` 0 means that a token sees everything before it.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    q_per_kv: int
    first_q: int
    window: int


class Attention:
    """Self-attention of the rank's heads over the paged cache; the output is a partial sum."""

    def __init__(
        self, share: HeadShare, tensors: ShardTensors, prefix: str, dtype: torch.dtype, eps: float
    ) -> None:
        self._share = share
        self._eps = eps
        self._qkv = take_linear(tensors, f"{prefix}.qkv", dtype, empty=not share.q_heads)
        self._o = take_linear(tensors, f"{prefix}.o", dtype, empty=not share.q_heads)
        self._q_norm = take_tensor(tensors, f"{prefix}.q_norm")
        self._k_norm = take_tensor(tensors, f"{prefix}.k_norm")

    def __call__(self, x: Tensor, step: StepInput, cos_sin: Tensor, cache: LayerCache) -> Tensor:
        """[T, H] to the rank's partial sum [T, H]; writes this step's keys and values."""
        if self._qkv is None or self._o is None:
            return torch.zeros_like(x)
        share = self._share
        q_size, kv_size = share.q_heads * share.head_dim, share.kv_heads * share.head_dim
        q, k, v = (
            part.reshape(x.shape[0], -1, share.head_dim)
            for part in torch.split(self._qkv(x), [q_size, kv_size, kv_size], dim=-1)
        )
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._normed(q, self._q_norm), self._normed(k, self._k_norm)
        q = ops.rope_and_cache(
            q, k, v, step.positions, cos_sin, cache.keys, cache.values, step.slots
        )
        y = ops.paged_attention(
            q,
            cache.keys,
            cache.values,
            step.block_tables,
            step.query_starts,
            step.context_lens,
            share.head_dim**-0.5,
            share.q_per_kv,
            share.first_q,
            sliding_window=share.window,
        )
        return self._o(y.reshape(x.shape[0], q_size))

    def _normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.reshape(-1, heads.shape[-1])
        return ops.rms_norm(flat, weight, self._eps, None)[0].view(heads.shape)


class Mlp:
    """down(silu(gate x) * up x) on the rank's features; the output is a partial sum."""

    def __init__(
        self, features: int, tensors: ShardTensors, prefix: str, dtype: torch.dtype
    ) -> None:
        self._gate_up = take_linear(tensors, f"{prefix}.gate_up", dtype, empty=not features)
        self._down = take_linear(tensors, f"{prefix}.down", dtype, empty=not features)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to the rank's partial sum [T, H]."""
        if self._gate_up is None or self._down is None:
            return torch.zeros_like(x)
        return self._down(ops.silu_mul(self._gate_up(x)))


def take_linear(
    tensors: ShardTensors, name: str, dtype: torch.dtype, *, empty: bool
) -> Linear | None:
    """Move a linear and its bias out of `tensors`; None where the rank's share of it is `empty`.

    Raises CheckpointError when it is missing.
    """
    weight = tensors.pop(name, None)
    bias = take_tensor(tensors, f"{name}_bias")
    if empty:
        return None
    if weight is None:
        raise CheckpointError(f"The checkpoint has no weight for {name}.")
    return Linear(weight, bias, dtype)


def take_tensor(tensors: ShardTensors, name: str) -> Tensor | None:
    """Move a plain tensor out of `tensors`; None when it is not there.

    Raises CheckpointError when it is quantised, which only a linear's weight may be.
    """
    tensor = tensors.pop(name, None)
    if tensor is None or isinstance(tensor, Tensor):
        return tensor
    raise CheckpointError(f"The checkpoint's {name} is quantised; only linear weights may be.")


def need_tensor(tensors: ShardTensors, name: str) -> Tensor:
    """Move a plain tensor out of `tensors`. Raises CheckpointError when it is missing."""
    tensor = take_tensor(tensors, name)
    if tensor is None:
        raise CheckpointError(f"The checkpoint has no {name}.")
    return tensor
