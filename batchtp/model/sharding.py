"""Which part of the model each rank owns: arithmetic on the config's numbers, no tensors.

Heads, MLP features and vocabulary rows are dealt in whole units as evenly as they go; shares may be
unequal, and empty. A run of features may start inside a quantisation group: its scale and zero are
then on both ranks (see kernels.weights), so no degree needs padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchtp.model.config import ModelConfig

# Vocabulary rows and MLP features never split one packed int32 of eight nibbles.
_PACKED = 8
# 32 features: a GGUF block, and the least group size in common use.
_FEATURE_UNITS = (32, 16, _PACKED)


def deal(total: int, parts: int, unit: int) -> tuple[range, ...]:
    """`total` things in contiguous runs for `parts` owners, whole units each, larger runs first.

    A tail shorter than a unit goes with the last owner of a unit (with the first when there is no
    whole unit). Runs may be empty. Raises ValueError unless parts and unit are positive.
    """
    if total < 0 or parts < 1 or unit < 1:
        raise ValueError(f"cannot deal {total} things in units of {unit} to {parts} owners")
    units = total // unit
    share, extra = divmod(units, parts)
    last_owner = max(min(units, parts) - 1, 0)
    runs = []
    start = 0
    for part in range(parts):
        stop = start + (share + (part < extra)) * unit
        if part == last_owner:
            stop += total % unit
        runs.append(range(start, stop))
        start = stop
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one rank of a TP group owns, as ranges of the whole model's numbering.

    `kv_heads` are those that the rank's q heads read; one that q heads of several ranks read is on
    each of them.
    """

    tp: int
    rank: int
    q_heads: range
    kv_heads: range
    intermediate: range
    vocab: range

    @staticmethod
    def make(config: ModelConfig, tp: int, rank: int) -> ShardPlan:
        """The plan of `rank`. Raises ValueError unless 0 <= rank < tp."""
        if not 0 <= rank < tp:
            raise ValueError(f"rank {rank} is not in a group of {tp}")
        q_heads = deal(config.num_heads, tp, 1)[rank]
        return ShardPlan(
            tp=tp,
            rank=rank,
            q_heads=q_heads,
            kv_heads=_covering(q_heads, config.num_heads // config.num_kv_heads),
            intermediate=deal(
                config.intermediate_size, tp, _feature_unit(config.intermediate_size)
            )[rank],
            vocab=deal(config.vocab_size, tp, _PACKED)[rank],
        )


def _covering(q_heads: range, q_per_kv: int) -> range:
    first = q_heads.start // q_per_kv
    if not q_heads:
        return range(first, first)
    return range(first, (q_heads.stop - 1) // q_per_kv + 1)


def _feature_unit(features: int) -> int:
    return next((unit for unit in _FEATURE_UNITS if features % unit == 0), _PACKED)
