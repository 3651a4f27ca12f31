"""Shards put together again are the whole model, in every format and at every degree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import Quantised, write_config, write_hf, write_tensors
from rank_driver import DATA, all_checkpoints
from safetensors.torch import load_file
from torch import Tensor

from batchtp.errors import CheckpointError, ModelError, UnsupportedModelError
from batchtp.kernels.weights import Int4Weight, dequantize
from batchtp.model.config import ModelConfig, load_config
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan

CPU = torch.device("cpu")
DEGREES = [2, 3, 5, 8]
OWN = {path.name: path for path in all_checkpoints() if path.parent == DATA}
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("awq", {}),
    ("gptq", {}),
    ("gptq", {"sym": True, "act_order": True}),
    ("gptq", {"bits": 8}),
    ("gptq", {"group_size": 0}),
    ("gptq_v2", {"act_order": True}),
    ("compressed-tensors", {}),
    ("compressed-tensors", {"sym": True, "act_order": True}),
    ("compressed-tensors", {"act_order": True, "group_size": 16}),
    ("compressed-tensors", {"bits": 8}),
    ("compressed-tensors", {"sym": True, "group_size": 0}),
]


def shards(path: Path, tp: int) -> list[dict[str, Any]]:
    config = load_config(path)
    return [
        load_shard(path, config, ShardPlan.make(config, tp, rank), torch.float32, CPU)
        for rank in range(tp)
    ]


def dense(weight: Tensor | Int4Weight | tuple[Any, ...]) -> Tensor:
    """float32 [n, k]."""
    if isinstance(weight, tuple):
        return torch.cat([dense(part) for part in weight])
    return weight if isinstance(weight, Tensor) else dequantize(weight).t()


def together(path: Path, tp: int) -> dict[str, Tensor]:
    """Every weight of the model, from the shards of a group."""
    config = load_config(path)
    whole: dict[str, Tensor] = {}
    for rank, tensors in enumerate(shards(path, tp)):
        plan = ShardPlan.make(config, tp, rank)
        for name, shape, rows, columns, value in pieces(config, plan, tensors):
            place = whole.setdefault(name, torch.full(shape, torch.nan))[rows, columns]
            known = ~place.isnan()
            assert torch.equal(place[known], value[known]), f"ranks differ on {name}"
            place.copy_(value)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def pieces(config: ModelConfig, plan: ShardPlan, tensors: Mapping[str, Any]) -> list[Any]:
    """Each tensor of a shard as (name, whole shape, rows, columns, values), 2-dimensional."""
    hidden, size, every = config.hidden_size, config.head_dim, slice(None)
    widths = {"q": config.num_heads * size, "k": config.num_kv_heads * size}
    widths |= {"v": widths["k"], "gate": config.intermediate_size, "up": config.intermediate_size}
    q, kv = (range(r.start * size, r.stop * size) for r in (plan.q_heads, plan.kv_heads))
    runs = {"q": q, "k": kv, "v": kv, "gate": plan.intermediate, "up": plan.intermediate}
    found = []
    for name, weight in tensors.items():
        last = name.rpartition(".")[2].removesuffix("_bias")
        value = dense(weight)
        value = value if value.ndim == 2 else value[:, None]
        width = value.shape[1]
        if last in ("embed", "lm_head"):
            rows = slice(plan.vocab.start, plan.vocab.stop)
            found.append((name, (config.vocab_size, hidden), rows, every, value))
        elif last in ("o", "down") and not name.endswith("_bias"):
            run = q if last == "o" else plan.intermediate
            whole = (hidden, widths["q" if last == "o" else "up"])
            found.append((name, whole, every, slice(run.start, run.stop), value))
        elif last in ("qkv", "gate_up"):
            parts = ("q", "k", "v") if last == "qkv" else ("gate", "up")
            for part, piece in zip(
                parts, value.split([len(runs[part]) for part in parts]), strict=True
            ):
                rows = slice(runs[part].start, runs[part].stop)
                found.append((f"{name}:{part}", (widths[part], width), rows, every, piece))
        else:
            found.append((name, tuple(value.shape), every, every, value))
    return found


def assert_same(whole: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> None:
    assert whole.keys() == one.keys()
    for name, value in one.items():
        assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("checkpoint", all_checkpoints(), ids=lambda path: path.name)
def test_shards_of_every_checkpoint_are_the_whole(checkpoint: Path) -> None:
    one = together(checkpoint, 1)
    for tp in DEGREES if checkpoint.parent == DATA else DEGREES[1:2]:
        assert_same(together(checkpoint, tp), one)


@pytest.mark.parametrize(("method", "linear"), FORMATS, ids=str)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_known_weights_come_back_exactly(
    tmp_path: Path, method: str, linear: dict[str, Any], tp: int
) -> None:
    known = write_hf(tmp_path, method, **linear)
    whole = together(tmp_path, tp)
    names = {
        "embed": "model.embed_tokens",
        "lm_head": "lm_head",
        "norm": "model.norm",
        "layers.0.input_norm": "model.layers.0.input_layernorm",
        "layers.0.post_norm": "model.layers.0.post_attention_layernorm",
        "layers.0.o": "model.layers.0.self_attn.o_proj",
        "layers.0.down": "model.layers.0.mlp.down_proj",
        **{f"layers.0.qkv:{p}": f"model.layers.0.self_attn.{p}_proj" for p in "qkv"},
        **{f"layers.0.gate_up:{p}": f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")},
    }
    assert whole.keys() == names.keys()
    for name, theirs in names.items():
        assert torch.equal(whole[name].squeeze(1), known[f"{theirs}.weight"]), name


def test_linears_side_by_side_become_one_weight() -> None:
    tensors = shards(OWN["ct-gptq-actgroup-g64"], 2)[0]
    fused = tensors["layers.0.qkv"]
    assert isinstance(fused, Int4Weight)
    assert fused.n == (2 + 1 + 1) * 64
    # A row-parallel weight under act-order keeps every group.
    down = tensors["layers.0.down"]
    assert down.group_index is not None
    assert down.scales.shape[0] == 512 // 64
    assert down.k == 256


def test_a_group_that_straddles_two_ranks_is_on_both(tmp_path: Path) -> None:
    write_hf(tmp_path, "awq", group_size=32)
    first, second = (part["layers.0.o"] for part in shards(tmp_path, 2))
    assert (first.first_group_offset, second.first_group_offset) == (0, 20)
    assert torch.equal(first.scales[0], second.scales[0])


def test_a_rank_with_nothing_has_only_what_all_have() -> None:
    tensors = shards(OWN["ct-gptq-actgroup-g64"], 8)[7]
    assert "layers.0.qkv" not in tensors
    assert "layers.0.o" not in tensors
    assert "layers.0.gate_up" in tensors


def edited(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Tensor], dict[str, Any]], None]
) -> Path:
    """A copy of a checkpoint with its tensors and config changed."""
    copy = tmp_path / "edited"
    shutil.copytree(OWN[name], copy)
    tensors = load_file(copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    edit(tensors, config)
    write_tensors(copy, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("claimed", ["gptq", "gptq_v2"])
def test_a_symmetric_file_tells_its_version_itself(
    tmp_path: Path, stored: str, claimed: str
) -> None:
    known = write_hf(tmp_path, stored, sym=True)
    write_config(tmp_path, claimed, {"sym": True}, {})
    down = dense(shards(tmp_path, 1)[0]["layers.0.down"])
    assert torch.equal(down, known["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("part", ["weight", "qweight"])
def test_a_tied_model_may_ship_a_head_anyway(tmp_path: Path, part: str) -> None:
    path = edited(
        tmp_path, "awq-g64", lambda t, _: t.update({f"lm_head.{part}": torch.ones((2, 2))})
    )
    assert_same(together(path, 2), together(OWN["awq-g64"], 1))


def test_formats_mixed_in_one_layer_stay_apart(tmp_path: Path) -> None:
    known = write_hf(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{module}.{part}"]
    tensors[f"{module}.weight"] = known[f"{module}.weight"]
    write_tensors(tmp_path, tensors)
    for tp in (1, 2):
        parts = shards(tmp_path, tp)[0]["layers.0.qkv"]
        assert [type(part) for part in parts] == [Tensor, Int4Weight, Int4Weight]
        assert torch.equal(together(tmp_path, tp)["layers.0.qkv:q"], known[f"{module}.weight"])


def test_different_group_sizes_in_one_layer_stay_apart(tmp_path: Path) -> None:
    write_hf(tmp_path, "gptq", group_size=32)
    tensors = load_file(tmp_path / "model.safetensors")
    other = Quantised(40, 64, group_size=16, seed=9)
    module = "model.layers.0.self_attn.v_proj"
    tensors |= {f"{module}.{part}": value for part, value in other.gptq().items()}
    write_tensors(tmp_path, tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"+:.*\.v_proj": {"group_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(shards(tmp_path, 2)[1]["layers.0.qkv"], tuple)
    assert torch.equal(together(tmp_path, 2)["layers.0.qkv:v"], other.dense())


def test_different_act_orders_in_one_layer_stay_apart(tmp_path: Path) -> None:
    write_hf(tmp_path, "gptq", act_order=True)
    tensors = load_file(tmp_path / "model.safetensors")
    other = Quantised(72, 64, act_order=True, seed=9)
    module = "model.layers.0.mlp.up_proj"
    tensors |= {f"{module}.{part}": value for part, value in other.gptq().items()}
    write_tensors(tmp_path, tensors)
    assert isinstance(shards(tmp_path, 2)[0]["layers.0.qkv"], Int4Weight)
    assert isinstance(shards(tmp_path, 2)[0]["layers.0.gate_up"], tuple)
    assert torch.equal(together(tmp_path, 2)["layers.0.gate_up:up"], other.dense())


def test_a_row_parallel_bias_is_on_rank_0_only(tmp_path: Path) -> None:
    write_hf(tmp_path, config={"attention_bias": True, "mlp_bias": True})
    tensors = load_file(tmp_path / "model.safetensors")
    sizes = {"q": 40, "k": 40, "v": 40, "o": 64}
    biases = {f"self_attn.{part}_proj": size for part, size in sizes.items()}
    biases |= {"mlp.gate_proj": 72, "mlp.up_proj": 72, "mlp.down_proj": 64}
    for i, (module, size) in enumerate(biases.items()):
        tensors[f"model.layers.0.{module}.bias"] = torch.arange(size) + 100.0 * i
    write_tensors(tmp_path, tensors)
    first, second = shards(tmp_path, 2)
    assert first["layers.0.o_bias"].shape == (64,)
    assert first["layers.0.down_bias"].shape == (64,)
    assert "layers.0.o_bias" not in second
    assert "layers.0.down_bias" not in second
    assert torch.equal(second["layers.0.qkv_bias"][:20], torch.arange(20, 40.0))
    assert torch.equal(second["layers.0.gate_up_bias"][:32], torch.arange(40, 72.0) + 400)


def test_a_bias_that_the_architecture_lacks_must_be_zero(tmp_path: Path) -> None:
    write_hf(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.bias"
    write_tensors(tmp_path, {**tensors, name: torch.zeros(64)})
    assert "layers.0.down_bias" not in shards(tmp_path, 1)[0]
    write_tensors(tmp_path, {**tensors, name: torch.ones(64)})
    with pytest.raises(UnsupportedModelError, match=name):
        shards(tmp_path, 1)


NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("awq-g64", lambda t, _: t.pop(NORM), rf"no tensor {NORM}"),
        ("awq-g64", lambda t, _: t.pop(f"{DOWN}.scales"), rf"no tensor {DOWN}.scales"),
        (
            "awq-g64",
            lambda t, _: t.update({NORM: torch.ones(7)}),
            rf"{NORM} in .*model.safetensors has shape \[7\]; the config implies \[256\]",
        ),
        (
            "awq-g64",
            lambda t, _: t.update({NORM: torch.ones(256, dtype=torch.int32)}),
            rf"{NORM} in .* is I32; expected F16",
        ),
        (
            "awq-g64",
            lambda _, c: c["quantization_config"].update(group_size=128),
            r"qzeros in .* has shape \[4, 32\]; the config implies \[2, 32\]",
        ),
        (
            "gptqv2-sym-g128",
            lambda _, c: c["quantization_config"].update(bits=8),
            r"qweight in .* has shape",
        ),
        (
            "gptqv2-sym-g128",
            lambda _, c: c["quantization_config"].update(dynamic={".*q_proj": {"bits": 3}}),
            r"q_proj is quantised to 3 bits",
        ),
        (
            "gptqv2-sym-g128",
            lambda t, _: t[f"{DOWN}.g_idx"].fill_(99),
            r"down_proj.g_idx points outside the 2 groups",
        ),
        (
            "ct-asym-g32-zero-range",
            lambda t, _: t[f"{DOWN}.weight_shape"].fill_(1),
            r"weight_shape says \[1, 1\]; the config implies \[128, 256\]",
        ),
        (
            "ct-asym-g32-zero-range",
            lambda _, c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(
                symmetric=True
            ),
            r"has zero points; the config says it is symmetric",
        ),
        (
            "awq-g64",
            lambda t, _: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(64)}),
            r"q_norm.weight of .* has no place in a Qwen2ForCausalLM",
        ),
        ("awq-g64", lambda _, c: c.update(num_hidden_layers=1), r"layers\.1\..* has no place"),
        ("awq-g64", lambda _, c: c.pop("quantization_config"), r"no tensor .*q_proj.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, name: str, edit: Callable[..., Any], message: str
) -> None:
    path = edited(tmp_path, name, edit)
    with pytest.raises(ModelError, match=message):
        shards(path, 2)


@pytest.mark.parametrize("keep", [4, 200, 100_000])
def test_a_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    shutil.copytree(OWN["awq-g64"], tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short or corrupt"):
        shards(tmp_path / "cut", 1)


def test_a_missing_shard_file_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    places = dict.fromkeys(tensors, "model.safetensors")
    index.write_text(json.dumps({"weight_map": places}))
    assert together(tmp_path, 2)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": 5}}))
    with pytest.raises(CheckpointError, match="no weight_map of tensors to file names"):
        shards(tmp_path, 1)
    index.write_text(json.dumps({"weight_map": {**places, "lm_head.weight": "other.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"other\.safetensors is missing"):
        shards(tmp_path, 1)


def test_no_weights_and_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path)
    file = tmp_path / "model.safetensors"
    shutil.copy(file, tmp_path / "second.safetensors")
    with pytest.raises(CheckpointError, match="is in both"):
        shards(tmp_path, 1)
    for one in tmp_path.glob("*.safetensors"):
        one.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        shards(tmp_path, 1)
