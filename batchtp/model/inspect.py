"""Says what a checkpoint is without reading a weight, for people to look at first. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchtp.model.config import ModelConfig
from batchtp.model.memory import DEGREES, GIB, Load, RankMemory, memory
from batchtp.model.quantization import QuantConfig
from batchtp.model.shard_table import TensorShare, shard_table
from batchtp.model.sharding import ShardPlan
from batchtp.model.stored import StoredModel, open_stored

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shares:
    """What each rank of a group of `tp` owns, rank 0 first. KV heads may be on several ranks."""

    tp: int
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    mlp_features: tuple[int, ...]
    vocabulary: tuple[int, ...]
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """`facts`: by name, in the order to show them. `shares`: of every degree from 1 to 8."""

    facts: Mapping[str, object]
    shares: tuple[Shares, ...]
    load: Load
    model: StoredModel

    def table(self, tp: int) -> tuple[tuple[TensorShare, ...], ...]:
        """Every rank's tensors at a TP degree."""
        plans = (ShardPlan.make(self.model.config, tp, rank) for rank in range(tp))
        return tuple(
            shard_table(self.model, plan, dtype_bytes=self.load.dtype_bytes) for plan in plans
        )


def inspect_model(
    path: Path,
    *,
    sequences: int = 1,
    context: int = 0,
    dtype: str = "auto",
    quantize: str = "none",
) -> Inspection:
    """What a checkpoint is, and what serving so many sequences of so many tokens takes (`context`
    0: as many as the model can). `dtype` auto: the checkpoint's own.

    Raises ModelError as loading would.
    """
    model = open_stored(path, quantize=quantize)
    config = model.config
    load = Load(
        sequences=sequences,
        context=context or config.max_position_embeddings,
        dtype_bytes=_DTYPE_BYTES[config.torch_dtype if dtype == "auto" else dtype],
    )
    total = sum(size for _, size in model.tensors.values())
    kinds = Counter(kind for kind, _ in model.tensors.values())
    facts = {
        "path": str(path),
        "architecture": config.architecture,
        "format": _format(config.quantization),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": f"{config.num_heads} query, {config.num_kv_heads} KV, {config.head_dim} wide",
        "vocabulary": f"{config.vocab_size}{', tied' if config.tie_word_embeddings else ''}",
        "max_model_len": config.max_position_embeddings,
        "rope": f"{config.rope.kind}, theta {config.rope.theta:g}",
        "sliding_window": config.sliding_window or "none",
        "dtype": config.torch_dtype,
        "end_tokens": ", ".join(map(str, sorted(config.eos_token_ids))) or "none",
        "tensors": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "weights_gib": round(total / GIB, 3),
        "tp_degrees": _degrees(config),
    }
    return Inspection(facts, tuple(_shares(model, tp, load) for tp in DEGREES), load, model)


def _format(quantization: QuantConfig | None) -> str:
    if quantization is None:
        return "unquantised safetensors"
    if not quantization.checkpoint_format:
        return quantization.method
    groups = quantization.group_size or "all rows"
    details = [f"{quantization.bits}-bit", f"groups of {groups}"]
    details.append("symmetric" if quantization.sym else "asymmetric")
    if quantization.desc_act:
        details.append("act-order")
    return f"{quantization.method} ({quantization.checkpoint_format}), {', '.join(details)}"


def _degrees(config: ModelConfig) -> str:
    """Every degree loads; those that give each rank the same share are told apart."""
    even = [tp for tp in DEGREES if _is_even(config, tp)]
    rest = [tp for tp in DEGREES if tp not in even]
    uneven = f"; uneven shares: {', '.join(map(str, rest))}" if rest else ""
    return f"even shares: {', '.join(map(str, even))}{uneven}"


def _is_even(config: ModelConfig, tp: int) -> bool:
    plans = [ShardPlan.make(config, tp, rank) for rank in range(tp)]
    shares = {
        (len(plan.q_heads), len(plan.kv_heads), len(plan.intermediate), len(plan.vocab))
        for plan in plans
    }
    return len(shares) == 1 and bool(plans[0].q_heads)


def _shares(model: StoredModel, tp: int, load: Load) -> Shares:
    plans = [ShardPlan.make(model.config, tp, rank) for rank in range(tp)]
    return Shares(
        tp=tp,
        query_heads=tuple(len(plan.q_heads) for plan in plans),
        kv_heads=tuple(len(plan.kv_heads) for plan in plans),
        mlp_features=tuple(len(plan.intermediate) for plan in plans),
        vocabulary=tuple(len(plan.vocab) for plan in plans),
        memory=memory(model, tp, load),
    )
