"""Says what a checkpoint is without reading a weight, for people to look at first. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchtp.model.config import ModelConfig, load_config
from batchtp.model.gguf import open_gguf
from batchtp.model.names import EMBEDDING, check_names, gguf_module
from batchtp.model.quantization import QuantConfig
from batchtp.model.safetensors_index import index_tensors
from batchtp.model.sharding import ShardPlan

DEGREES = range(1, 9)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor: its type's name, its size, and whether the embedding owns it."""

    kind: str
    nbytes: int
    embedding: bool


def inspect_model(path: Path) -> Mapping[str, object]:
    """Facts by name, in the order to show them. Raises ModelError as loading would."""
    config = load_config(path)
    tensors = _gguf_tensors(path, config) if path.is_file() else _hf_tensors(path, config)
    total = sum(tensor.nbytes for tensor in tensors)
    kinds = Counter(tensor.kind for tensor in tensors)
    return {
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
        "gib_per_rank": ", ".join(
            f"tp {tp}: {_largest_share(config, tensors, tp) / _GIB:.3f}" for tp in (1, 2, 4, 8)
        ),
    }


def _hf_tensors(path: Path, config: ModelConfig) -> list[_Stored]:
    tensors = index_tensors(path)
    check_names(tensors, config, path, gguf=False)
    return [
        _Stored(info.dtype, info.nbytes, name.startswith(EMBEDDING))
        for name, info in tensors.items()
    ]


def _gguf_tensors(path: Path, config: ModelConfig) -> list[_Stored]:
    file = open_gguf(path)
    check_names(file.tensors, config, path, gguf=True)
    return [
        _Stored(tensor.type.name, tensor.nbytes, name.startswith(gguf_module(EMBEDDING)))
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


def _largest_share(config: ModelConfig, tensors: list[_Stored], tp: int) -> float:
    """Bytes of the checkpoint on rank 0, whose share is the largest: an estimate by features."""
    plan = ShardPlan.make(config, tp, 0)
    embedding = sum(tensor.nbytes for tensor in tensors if tensor.embedding)
    rest = sum(tensor.nbytes for tensor in tensors) - embedding
    heads = len(plan.q_heads) / config.num_heads
    features = len(plan.intermediate) / config.intermediate_size
    return embedding * len(plan.vocab) / config.vocab_size + rest * max(heads, features)
