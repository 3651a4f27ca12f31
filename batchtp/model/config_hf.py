"""Reads a Hugging Face directory's config.json, and the files beside it that amend it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchtp.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from batchtp.model.config_records import MOST_LAYERS, ModelConfig, RopeConfig
from batchtp.model.quantization import QuantConfig, parse_quantization

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")
# transformers' own defaults, for the keys that old configs leave out.
_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6
# What a value of another kind than it should be raises; JSON may even hold an infinity.
_MALFORMED = (TypeError, ValueError, ArithmeticError, AttributeError)


def read_hf_config(directory: Path) -> ModelConfig:
    """The directory's ModelConfig. Raises ModelError as load_config does."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{directory} has no config.json: it is not a model directory.")
    raw = read_json(path)
    architecture = _architecture(raw, path)
    try:
        return _model_config(architecture, raw, directory)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]!r}.") from error
    except _MALFORMED as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As read_json; empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {name} is not supported; {', '.join(ARCHITECTURES)} are."
        )
    if raw.get("auto_map"):
        raise UnsupportedModelError(f"{path}: it asks to run remote code, which is never done.")
    return name


def _model_config(architecture: str, raw: Mapping[str, Any], directory: Path) -> ModelConfig:
    llama, qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    qwen3 = architecture == "Qwen3ForCausalLM"
    heads, layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    hidden = int(raw["hidden_size"])
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers are more than the {MOST_LAYERS} there can be")
    attention_bias = bool(raw.get("attention_bias", False)) and (llama or qwen3)
    # Before grouped-query attention, Llama configs had no number of KV heads.
    kv_heads = raw.get("num_key_value_heads") or (heads if llama else raw["num_key_value_heads"])
    window, sliding = _sliding(architecture, raw, layers)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(raw.get("head_dim") or (128 if qwen3 else hidden // heads)),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", _DEFAULT_EPS)),
        rope=_rope(raw),
        attention_bias=attention_bias or qwen2,
        attention_output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and llama,
        qk_norm=qwen3,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=window,
        sliding_layers=sliding,
        hidden_act=str(raw.get("hidden_act", "silu")),
        torch_dtype=_dtype(raw),
        eos_token_ids=eos_token_ids(directory, raw),
        bos_token_id=_one_id(raw.get("bos_token_id")),
        quantization=_quantization(raw, directory),
    )


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float16").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"config.json: dtype {name!r} is not supported; {', '.join(DTYPES)} are."
        )
    return name


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From rope_scaling and rope_theta, or transformers 5's rope_parameters, which has both."""
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"config.json: rope parameters of several layer types ({', '.join(given)}) are not "
            "supported; one set for all layers is."
        )
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA)
    partial = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if float(partial) != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial} is not supported; only 1 is."
        )
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta)
    positions = int(raw["max_position_embeddings"])
    original = int(
        given.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or positions
    )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(given.get("factor") or positions / original),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_optional_float(given.get("attention_factor")),
        mscale=_optional_float(given.get("mscale")),
        mscale_all_dim=_optional_float(given.get("mscale_all_dim")),
        truncate=bool(given.get("truncate", True)),
    )


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _sliding(
    architecture: str, raw: Mapping[str, Any], layers: int
) -> tuple[int | None, frozenset[int]]:
    """The window and the layers that have it, as transformers decides it for each family."""
    window = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return None, frozenset()
    every = frozenset(range(layers))
    if architecture == "MistralForCausalLM":
        return int(window), every
    if not raw.get("use_sliding_window", False):
        return None, frozenset()
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        return int(window), frozenset(layer for layer in every if layer >= first)
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return int(window), frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _quantization(raw: Mapping[str, Any], directory: Path) -> QuantConfig | None:
    """From config.json, or from the file of its own that older tools wrote instead."""
    given = raw.get("quantization_config") or raw.get("compression_config")
    if given:
        return parse_quantization(given, str(directory / "config.json"))
    for name in ("quantize_config.json", "quant_config.json"):
        if (directory / name).is_file():
            return parse_quantization(read_json(directory / name), str(directory / name))
    return None


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Every id that config.json, generation_config.json or the tokenizer says ends a text.

    Raises CheckpointError when one of them is malformed.
    """
    generation = read_json_if_there(directory / "generation_config.json")
    tokenizer = read_json_if_there(directory / "tokenizer_config.json")
    token = token_text(tokenizer.get("eos_token"))
    try:
        found = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        if token is not None:
            found.update(_ids(_id_of(token, tokenizer, directory)))
    except (*_MALFORMED, KeyError) as error:
        raise CheckpointError(
            f"{directory}: an end-of-sequence token in its JSON files is malformed: {error}."
        ) from error
    return frozenset(found)


def token_text(token: Any) -> str | None:
    """A special token's text: tokenizer_config.json has it plain, or inside an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _id_of(token: str, tokenizer: Mapping[str, Any], directory: Path) -> int | None:
    for number, added in (tokenizer.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(number)
    whole = read_json_if_there(directory / "tokenizer.json")
    for added in whole.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    vocabulary = (whole.get("model") or {}).get("vocab")
    return vocabulary.get(token) if isinstance(vocabulary, Mapping) else None


def _ids(value: Any) -> Iterable[int]:
    """An id field: a number, a list of them, or null."""
    if value is None:
        return ()
    return [int(one) for one in value] if isinstance(value, list) else (int(value),)


def _one_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)
