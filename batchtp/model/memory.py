"""Which TP degrees fit a card: weights, KV cache and working memory of the rank that has most.

Weights are exact (see shard_table). The cache is what a given number of sequences of a given
length fill. Working memory is an estimate, on the safe side: a CUDA context, the activations of one
step of `STEP_TOKENS`, and the logits of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchtp.model.shard_table import shard_table, total_bytes
from batchtp.model.sharding import ShardPlan
from batchtp.model.stored import StoredModel

DEGREES = range(1, 9)
GIB = 1 << 30
# As the settings' defaults: the tokens of a step, those of a block, the share of a card to fill.
STEP_TOKENS, BLOCK_TOKENS, CARD_SHARE = 1024, 16, 0.9
# A CUDA context with its libraries, as worker.cache counts it.
_CONTEXT_BYTES = 700 * 2**20
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served: sequences at once, the tokens of each, bytes of a number."""

    sequences: int
    context: int
    dtype_bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank."""

    weights: int
    kv_cache: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.working


def memory(model: StoredModel, tp: int, load: Load) -> tuple[RankMemory, ...]:
    """Every rank's memory at a TP degree, rank 0 first."""
    plans = (ShardPlan.make(model.config, tp, rank) for rank in range(tp))
    return tuple(
        RankMemory(
            weights=total_bytes(shard_table(model, plan, dtype_bytes=load.dtype_bytes)),
            kv_cache=kv_bytes(model, plan, load),
            working=_working_bytes(model, plan, load),
        )
        for plan in plans
    )


def kv_bytes(model: StoredModel, plan: ShardPlan, load: Load) -> int:
    """The cache of all sequences, in whole blocks."""
    config = model.config
    tokens = -(-load.context // BLOCK_TOKENS) * BLOCK_TOKENS * load.sequences
    row = len(plan.kv_heads) * config.head_dim * load.dtype_bytes
    return 2 * config.num_layers * row * tokens


def _working_bytes(model: StoredModel, plan: ShardPlan, load: Load) -> int:
    config = model.config
    heads = (len(plan.q_heads) + 2 * len(plan.kv_heads)) * config.head_dim
    # The residual, a norm's output, a partial sum and its reduction; q, k and v; gate, up, product.
    token = (4 * config.hidden_size + 2 * heads + 3 * len(plan.intermediate)) * load.dtype_bytes
    logits = load.sequences * config.vocab_size * (load.dtype_bytes + _FLOAT32_BYTES)
    return _CONTEXT_BYTES + STEP_TOKENS * token + (logits if plan.rank == 0 else 0)


def fits(ranks: tuple[RankMemory, ...], card_bytes: int) -> bool:
    """Whether every rank's memory is within what may be filled of a card of its own."""
    return max(rank.total for rank in ranks) <= card_bytes * CARD_SHARE
