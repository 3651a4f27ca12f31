"""Says what a checkpoint is without reading a weight, for people to look at first. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchtp.model.config import ModelConfig, load_config
from batchtp.model.gguf import open_gguf
from batchtp.model.names import (
    DOWN,
    EMBEDDING,
    GATE,
    LM_HEAD,
    UP,
    K,
    O,
    Q,
    V,
    check_names,
    layer_part,
)
from batchtp.model.quantization import QuantConfig
from batchtp.model.safetensors_index import index_tensors
from batchtp.model.sharding import ShardPlan

DEGREES = range(1, 9)
_GIB = 1 << 30
# Under act-order an input may be in any group, so a rank keeps these whole.
_GROUP_TENSORS = frozenset({"scales", "qzeros", "weight_scale", "weight_zero_point"})


@dataclass(frozen=True, slots=True)
class Shares:
    """What each rank of a group of `tp` owns, rank 0 first. KV heads may be on several ranks.

    `nbytes`: of the checkpoint's tensors, a group that two ranks share counted by its rows.
    """

    tp: int
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    mlp_features: tuple[int, ...]
    vocabulary: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """`facts`: by name, in the order to show them. `shares`: of every degree from 1 to 8."""

    facts: Mapping[str, object]
    shares: tuple[Shares, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor: its type's name, its size, its linear without the layer, and whether a rank of a
    row-parallel linear keeps it whole.
    """

    kind: str
    nbytes: int
    part: str
    whole: bool = False


def inspect_model(path: Path) -> Inspection:
    """What a checkpoint is. Raises ModelError as loading would."""
    config = load_config(path)
    tensors = _gguf_tensors(path, config) if path.is_file() else _hf_tensors(path, config)
    total = sum(tensor.nbytes for tensor in tensors)
    kinds = Counter(tensor.kind for tensor in tensors)
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
        "weights_gib": round(total / _GIB, 3),
        "tp_degrees": _degrees(config),
    }
    return Inspection(facts, tuple(_shares(config, tensors, tp) for tp in DEGREES))


def _hf_tensors(path: Path, config: ModelConfig) -> list[_Stored]:
    tensors = index_tensors(path)
    check_names(tensors, config, path, gguf=False)
    found = []
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        act_order = (
            last in _GROUP_TENSORS
            and config.quantization is not None
            and config.quantization.scheme(module).desc_act
        )
        found.append(_Stored(info.dtype, info.nbytes, layer_part(module), act_order))
    return found


def _gguf_tensors(path: Path, config: ModelConfig) -> list[_Stored]:
    file = open_gguf(path)
    check_names(file.tensors, config, path, gguf=True)
    return [
        _Stored(tensor.type.name, tensor.nbytes, layer_part(name.rpartition(".")[0]))
        for name, tensor in file.tensors.items()
    ]


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


def _shares(config: ModelConfig, tensors: list[_Stored], tp: int) -> Shares:
    plans = [ShardPlan.make(config, tp, rank) for rank in range(tp)]
    return Shares(
        tp=tp,
        query_heads=tuple(len(plan.q_heads) for plan in plans),
        kv_heads=tuple(len(plan.kv_heads) for plan in plans),
        mlp_features=tuple(len(plan.intermediate) for plan in plans),
        vocabulary=tuple(len(plan.vocab) for plan in plans),
        nbytes=tuple(_owned_bytes(config, tensors, plan) for plan in plans),
    )


def _owned_bytes(config: ModelConfig, tensors: list[_Stored], plan: ShardPlan) -> int:
    vocab = (len(plan.vocab), config.vocab_size)
    queries = (len(plan.q_heads), config.num_heads)
    keys = (len(plan.kv_heads), config.num_kv_heads)
    features = (len(plan.intermediate), config.intermediate_size)
    owned = {EMBEDDING: vocab, LM_HEAD: (0, 1) if config.tie_word_embeddings else vocab}
    owned |= {Q: queries, K: keys, V: keys, O: queries}
    owned |= {GATE: features, UP: features, DOWN: features}
    total = 0
    for tensor in tensors:
        count, of = owned.get(tensor.part, (1, 1))
        if tensor.whole and tensor.part in (O, DOWN) and count:
            count = of
        total += tensor.nbytes * count // of
    return total
