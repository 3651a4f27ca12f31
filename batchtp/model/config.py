"""What a checkpoint says about itself: a decoder's shape, its rotary embedding, its quantisation.

No torch, and no weight is read: a model that cannot be served is refused here, by name.
"""

from __future__ import annotations

import math
from pathlib import Path

from batchtp.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from batchtp.model.config_gguf import read_gguf_config
from batchtp.model.config_hf import read_hf_config
from batchtp.model.config_records import ModelConfig, RopeConfig

__all__ = ["ModelConfig", "RopeConfig", "load_config"]

ROPE_KINDS = ("default", "linear", "llama3", "dynamic", "yarn")


def load_config(path: Path) -> ModelConfig:
    """The config of a Hugging Face directory or a GGUF file.

    Raises ModelNotFoundError when there is none, CheckpointError when it is malformed,
    UnsupportedModelError when it asks for what the decoder cannot do.
    """
    if path.is_dir():
        return _checked(read_hf_config(path), path)
    if path.is_file():
        return _checked(read_gguf_config(path), path)
    raise ModelNotFoundError(f"There is no model at {path}.")


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    sizes = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
    }
    for name, value in sizes.items():
        if value < 1:
            raise CheckpointError(f"{path}: {name} is {value}; it must be positive.")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: {config.num_heads} heads do not share {config.num_kv_heads} KV heads evenly."
        )
    if config.head_dim % 2 or config.head_dim < 4:
        raise UnsupportedModelError(
            f"{path}: head_dim {config.head_dim}; rotary embeddings need an even number above 2."
        )
    if not 0 < config.rms_norm_eps < 1:
        raise CheckpointError(f"{path}: rms_norm_eps is {config.rms_norm_eps}.")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise CheckpointError(f"{path}: sliding_window is {config.sliding_window}.")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(
            f"{path}: hidden_act {config.hidden_act!r} is not supported; only silu is."
        )
    _check_rope(config.rope, path)
    return config


def _check_rope(rope: RopeConfig, path: Path) -> None:
    if rope.kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{path}: rope scaling {rope.kind!r} is not supported; {', '.join(ROPE_KINDS)} are."
        )
    if not 0 < rope.theta < math.inf or not 0 < rope.factor < math.inf:
        raise CheckpointError(
            f"{path}: rope theta {rope.theta} and factor {rope.factor} must be above 0, and finite."
        )
    if rope.kind in ("llama3", "yarn") and rope.original_max_position_embeddings < 1:
        raise CheckpointError(f"{path}: rope scaling {rope.kind} lacks its original length.")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"{path}: rope scaling llama3 has high_freq_factor below low_freq_factor."
        )
