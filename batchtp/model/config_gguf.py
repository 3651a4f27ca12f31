"""Reads a ModelConfig from a GGUF file's keys and from which tensors it has. No torch."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from batchtp.errors import CheckpointError, UnsupportedModelError
from batchtp.model.config_records import MOST_LAYERS, ModelConfig, RopeConfig
from batchtp.model.gguf import BF16, F32, GgufFile, open_gguf, read_blocks
from batchtp.model.quantization import GGUF, QuantConfig
from batchtp.model.ranged import RangedFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_BLOCK = 32
# Scalings as llama.cpp names them.
_SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn"}
# Llama 3's scaling is stored as one divisor a frequency, and all files were made with these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def read_gguf_config(path: Path) -> ModelConfig:
    """The file's ModelConfig. Raises ModelError as load_config does."""
    file = open_gguf(path)
    architecture = str(file.keys.get("general.architecture", "none"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {architecture} is not supported; {', '.join(ARCHITECTURES)} are."
        )
    if (file.integer("split.count") or 1) > 1:
        raise UnsupportedModelError(f"{path} is one part of a split model. Merge the parts first.")
    if file.keys.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(f"{path}: mixtures of experts are not supported.")
    try:
        return _model_config(file, architecture)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]!r}.") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path} has a malformed key: {error}.") from error


def _model_config(file: GgufFile, architecture: str) -> ModelConfig:
    keys, tensors = file.keys, file.tensors

    def key(name: str) -> Any:
        return keys[f"{architecture}.{name}"]

    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    layers = int(key("block_count"))
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers are more than the {MOST_LAYERS} there can be")
    head_dim = int(keys.get(f"{architecture}.attention.key_length", hidden // heads))
    window = int(keys.get(f"{architecture}.attention.sliding_window", 0)) or None
    bf16 = any(tensor.type is BF16 for tensor in tensors.values())
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        hidden_size=hidden,
        intermediate_size=int(key("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(keys.get(f"{architecture}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=_vocab_size(file, architecture),
        max_position_embeddings=int(key("context_length")),
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, architecture, head_dim),
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        sliding_window=window,
        sliding_layers=frozenset(range(layers)) if window else frozenset(),
        torch_dtype="bfloat16" if bf16 else "float16",
        eos_token_ids=gguf_eos_token_ids(file),
        bos_token_id=file.integer("tokenizer.ggml.bos_token_id"),
        quantization=QuantConfig(method=GGUF, bits=4, group_size=_BLOCK, sym=False),
    )


def _vocab_size(file: GgufFile, architecture: str) -> int:
    """Rows of the embedding: some files state fewer tokens than they have rows."""
    embedding = file.tensors.get("token_embd.weight")
    return embedding.rows if embedding else int(file.keys[f"{architecture}.vocab_size"])


def _rope(file: GgufFile, architecture: str, head_dim: int) -> RopeConfig:
    keys, prefix = file.keys, f"{architecture}.rope"
    rotated = int(keys.get(f"{prefix}.dimension_count", head_dim))
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rotary embedding of {rotated} of {head_dim} dimensions is not supported."
        )
    theta = float(keys.get(f"{prefix}.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, head_dim)
    named = str(keys.get(f"{prefix}.scaling.type", "none"))
    kind = _SCALINGS.get(named, named)
    if kind == "default":
        return RopeConfig(theta)
    original = keys.get(
        f"{prefix}.scaling.original_context_length", keys[f"{architecture}.context_length"]
    )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(keys[f"{prefix}.scaling.factor"]),
        original_max_position_embeddings=int(original),
    )


def _llama3(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Recognise Llama 3's scaling in the stored divisors; any other set of them is refused."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type is not F32 or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor rope_freqs.weight is {tensor.type.name} {tensor.shape}; "
            f"expected F32 {(head_dim // 2,)}."
        )
    with closing(RangedFile(file.path)) as opened:
        stored = read_blocks(opened, tensor, range(1), range(head_dim // 2)).view("<f4")[0]
    factor = float(stored.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = (_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - blend.clip(0, 1)) / factor + blend.clip(0, 1))
    if not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling, and no other is supported."
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position_embeddings=_LLAMA3_ORIGINAL,
    )


def gguf_eos_token_ids(file: GgufFile) -> frozenset[int]:
    """Every id that the file says ends a text, a turn or a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.integer(f"tokenizer.ggml.{name}") for name in names)
    return frozenset(token for token in found if token is not None)
