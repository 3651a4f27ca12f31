"""The decoder of the Llama and Qwen2 families, as the checkpoint's config describes it.

    x = embed(tokens)
    for each layer:   x += sum over ranks of attention(norm(x))
                      x += sum over ranks of mlp(norm(x))
    logits = head(norm(x[sample rows]))          vocabulary shards side by side, on rank 0

A rank holds a share of the heads, of the MLP's features and of the vocabulary, and every rank runs
the same steps. Shares may be uneven, and empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchtp.errors import UnsupportedModelError
from batchtp.kernels import ops
from batchtp.model.config import ModelConfig
from batchtp.model.layers import (
    Attention,
    HeadShare,
    LayerCache,
    Linear,
    Mlp,
    ShardTensors,
    StepInput,
    VocabEmbedding,
    need_tensor,
    take_linear,
)
from batchtp.model.rope import rope_table
from batchtp.model.sharding import ShardPlan


class Collectives(Protocol):
    """What the decoder asks of the other ranks; worker.comm has the real ones."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x."""

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 every rank's columns side by side; None elsewhere."""


class Decoder:
    """One rank's part of the model."""

    def __init__(
        self,
        config: ModelConfig,
        shards: Sequence[ShardPlan],
        rank: int,
        tensors: ShardTensors,
        collectives: Collectives,
        *,
        max_model_len: int,
    ) -> None:
        """Takes the rank's tensors out of `tensors` (emptying it). `shards`: every rank's plan.

        Raises CheckpointError for a missing tensor, UnsupportedModelError for a length past what
        the rotary embedding is defined for.
        """
        check_length(config, max_model_len)
        embed = need_tensor(tensors, "embed")
        self.config = config
        self.shard = shards[rank]
        self.dtype = embed.dtype
        self.device = embed.device
        self._collectives = collectives
        self._widths = [len(shard.vocab) for shard in shards]
        alone = collectives.size == 1
        self.embed = VocabEmbedding(
            embed, self.shard.vocab, None if alone else collectives.all_reduce
        )
        self._cos_sin = rope_table(config, max_model_len, self.device)
        self._layers = [
            _Layer(config, self.shard, index, tensors, collectives, self.dtype)
            for index in range(config.num_layers)
        ]
        self._norm = need_tensor(tensors, "norm")
        self._head = self._take_head(tensors, embed)

    def forward(self, step: StepInput, cache: Sequence[LayerCache]) -> Tensor | None:
        """Logits of step.sample_rows, float32 [R, vocabulary], on rank 0; None on the others.

        Writes the step's keys and values into `cache`, one entry a layer. A collective:
        every rank calls it with the same step.
        """
        x, residual = self.embed(step.tokens), None
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x, residual = layer(x, residual, step, self._cos_sin, layer_cache)
        if not step.sample_rows.numel():
            return None
        rows = step.sample_rows
        last = residual[rows] if residual is not None else None
        x, _ = ops.rms_norm(x[rows], self._norm, self.config.rms_norm_eps, last)
        logits = self._collectives.gather_columns(self._head_shard(x), self._widths)
        return None if logits is None else logits.float()

    def _head_shard(self, x: Tensor) -> Tensor:
        return x.new_zeros((x.shape[0], 0)) if self._head is None else self._head(x)

    def _take_head(self, tensors: ShardTensors, embed: Tensor) -> Linear | None:
        if self.config.tie_word_embeddings and "lm_head" not in tensors:
            tensors["lm_head"] = embed
        return take_linear(tensors, "lm_head", self.dtype, empty=not self.shard.vocab)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        shard: ShardPlan,
        index: int,
        tensors: ShardTensors,
        collectives: Collectives,
        dtype: torch.dtype,
    ) -> None:
        prefix = f"layers.{index}"
        eps = config.rms_norm_eps
        self._eps = eps
        self._input_norm = need_tensor(tensors, f"{prefix}.input_norm")
        self._post_norm = need_tensor(tensors, f"{prefix}.post_norm")
        self._attention = Attention(head_share(config, shard, index), tensors, prefix, dtype, eps)
        self._mlp = Mlp(len(shard.intermediate), tensors, prefix, dtype)
        self._all_reduce = collectives.all_reduce

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInput,
        cos_sin: Tensor,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        y, residual = ops.rms_norm(x, self._input_norm, self._eps, residual)
        x = self._all_reduce(self._attention(y, step, cos_sin, cache))
        y, residual = ops.rms_norm(x, self._post_norm, self._eps, residual)
        return self._all_reduce(self._mlp(y)), residual


def head_share(config: ModelConfig, shard: ShardPlan, layer: int) -> HeadShare:
    """The rank's heads in this layer."""
    q_per_kv = config.num_heads // config.num_kv_heads
    return HeadShare(
        q_heads=len(shard.q_heads),
        kv_heads=len(shard.kv_heads),
        head_dim=config.head_dim,
        q_per_kv=q_per_kv,
        first_q=shard.q_heads.start - shard.kv_heads.start * q_per_kv,
        window=config.window(layer),
    )


def check_length(config: ModelConfig, max_model_len: int) -> None:
    """Raises UnsupportedModelError when the model has no positions that far."""
    limit = config.max_position_embeddings
    if config.rope.kind == "dynamic":
        limit = int(limit * config.rope.factor)
    if max_model_len > limit:
        raise UnsupportedModelError(
            f"max_model_len {max_model_len} is past the {limit} positions that the model's config "
            "defines. Lower it, or set 0 for the model's own."
        )
