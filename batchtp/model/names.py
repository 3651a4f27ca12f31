"""What the tensors of a decoder are called in checkpoints: Hugging Face's names, and GGUF's.

The loader speaks Hugging Face's. A module is a tensor's name without its last part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchtp.errors import CheckpointError
from batchtp.model.config_records import ModelConfig

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens", "model.norm", "lm_head"
Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"

_GGUF_MODULES = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", LM_HEAD: "output"}
_GGUF_LAYER = {
    Q: "attn_q",
    K: "attn_k",
    V: "attn_v",
    O: "attn_output",
    GATE: "ffn_gate",
    UP: "ffn_up",
    DOWN: "ffn_down",
    INPUT_NORM: "attn_norm",
    POST_NORM: "ffn_norm",
    Q_NORM: "attn_q_norm",
    K_NORM: "attn_k_norm",
}
# Every format's tensors of one module, by the last part of their names.
_PARTS = frozenset({"weight", "bias"})
_PARTS |= {"qweight", "qzeros", "scales", "g_idx"}
_PARTS |= {f"weight_{part}" for part in ("packed", "scale", "zero_point", "g_idx", "shape")}
# Derived from the config, or for a quantised KV cache, which is not used.
_HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.[kv]_scale)$")
_GGUF_HARMLESS = frozenset({"rope_freqs.weight"})
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ANY_LAYER = re.compile(r"^(?:model\.layers|blk)\.\d+\.")
_PART_NAMES = {name: name for name in (*_GGUF_MODULES, *_GGUF_LAYER)}
_PART_NAMES |= {theirs: ours for ours, theirs in (*_GGUF_MODULES.items(), *_GGUF_LAYER.items())}


def layer_module(layer: int, part: str) -> str:
    """A layer's module, such as model.layers.3.mlp.up_proj."""
    return f"model.layers.{layer}.{part}"


def gguf_module(module: str) -> str:
    """GGUF's name for a module."""
    match = _LAYER.fullmatch(module)
    if match is None:
        return _GGUF_MODULES[module]
    return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}"


def layer_part(module: str) -> str:
    """A module of either format in Hugging Face's name, without its layer: mlp.up_proj."""
    return _PART_NAMES.get(_ANY_LAYER.sub("", module), module)


def check_names(names: Iterable[str], config: ModelConfig, where: object, *, gguf: bool) -> None:
    """Raises CheckpointError for a tensor that the decoder has no use for: the config does not
    describe the whole of such a model, and leaving a part out would be wrong without a word.
    """
    modules = _modules(config)
    if gguf:
        modules = frozenset(gguf_module(module) for module in modules)
    for name in names:
        module, _, part = name.rpartition(".")
        known = module in modules and part in _PARTS
        if not known and name not in _GGUF_HARMLESS and not _HARMLESS.match(name):
            raise CheckpointError(
                f"Tensor {name} of {where} has no place in a {config.architecture} of "
                f"{config.num_layers} layers as its config describes it."
            )


def _modules(config: ModelConfig) -> frozenset[str]:
    parts = [part for part in _GGUF_LAYER if config.qk_norm or part not in (Q_NORM, K_NORM)]
    layers = range(config.num_layers)
    return frozenset(_GGUF_MODULES) | {layer_module(i, part) for i in layers for part in parts}
