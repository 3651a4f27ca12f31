"""What inspect says a rank holds is what a rank holds, byte by byte; and what fits, fits."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_hf
from rank_driver import DATA, all_checkpoints, demo_model

from batchtp.errors import UnsupportedModelError
from batchtp.kernels.packed import pack
from batchtp.kernels.weights import Int4Weight
from batchtp.model.config import load_config
from batchtp.model.inspect import inspect_model
from batchtp.model.loader import load_shard
from batchtp.model.memory import GIB, Load, fits, kv_bytes, memory
from batchtp.model.shard_file import pieces
from batchtp.model.shard_table import KERNEL, PLAIN, TensorShare, shard_table
from batchtp.model.sharding import ShardPlan
from batchtp.model.stored import open_stored
from batchtp.testing.random_awq import TRUE_SHAPES, Shape

CPU = torch.device("cpu")
OWN = [path for path in all_checkpoints() if path.parent == DATA]
# A decoder's tensor, and the rows of the table that are fused into it.
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "o": ("self_attn.o_proj",),
    "down": ("mlp.down_proj",),
    "lm_head": ("lm_head",),
    "embed": ("model.embed_tokens",),
}


def held(weights: dict[str, Any], name: str, layout: str) -> int:
    """Bytes of a decoder's tensors of this name over all layers."""
    total = 0
    for key, weight in weights.items():
        if key.rpartition(".")[2] in (name, f"{name}_bias"):
            for part in weight if isinstance(weight, tuple) else (weight,):
                if layout == KERNEL and isinstance(part, Int4Weight):
                    part = pack(part)
                total += part.nbytes
    return total


def said(table: tuple[TensorShare, ...], modules: tuple[str, ...]) -> int:
    """The same by the table."""
    names = {f"layers.*.{m}" for m in modules} | set(modules)
    return sum(
        share.layers * share.nbytes
        for share in table
        if share.tensor.removesuffix(".bias") in names
    )


CASES = [(path, tp) for path in [*OWN, "fp32"] for tp in range(1, 9)] + [("demo", 2), ("demo", 7)]


@pytest.mark.parametrize(("checkpoint", "tp"), CASES, ids=lambda c: getattr(c, "name", str(c)))
def test_a_rank_holds_the_bytes_of_the_table(
    checkpoint: Path | str, tp: int, tmp_path: Path
) -> None:
    if checkpoint == "fp32":
        write_hf(tmp_path)
        checkpoint = tmp_path
    elif checkpoint == "demo":
        checkpoint = demo_model()
    path = Path(checkpoint)
    config, model = load_config(path), open_stored(path)
    for rank in range(tp):
        plan = ShardPlan.make(config, tp, rank)
        weights = load_shard(path, config, plan, torch.float32, CPU)
        for layout in (PLAIN, KERNEL):
            table = shard_table(model, plan, dtype_bytes=4, layout=layout)
            for name, modules in FUSED.items():
                assert said(table, modules) == held(weights, name, layout), (rank, layout, name)
        plain = shard_table(model, plan, dtype_bytes=4, layout=PLAIN)
        assert sum(s.layers * s.nbytes for s in plain) == sum(t.nbytes for t in pieces(weights))


@pytest.mark.parametrize("tp", [1, 3, 8])
def test_a_rounded_model_holds_the_bytes_of_its_table(tmp_path: Path, tp: int) -> None:
    write_hf(tmp_path)
    config, model = load_config(tmp_path), open_stored(tmp_path, quantize="int4")
    for rank in range(tp):
        plan = ShardPlan.make(config, tp, rank)
        weights = load_shard(tmp_path, config, plan, torch.float32, CPU, quantize="int4")
        table = shard_table(model, plan, dtype_bytes=4, layout=PLAIN)
        assert sum(s.layers * s.nbytes for s in table) == sum(t.nbytes for t in pieces(weights))
    with pytest.raises(UnsupportedModelError, match="quantised already"):
        open_stored(DATA / "awq-g64", quantize="int4")


def headers_only(folder: Path, shape: Shape) -> Path:
    """A checkpoint of a true shape whose data is a hole in the file."""
    folder.mkdir()
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[str, list[int]]] = {
        "model.embed_tokens.weight": ("F16", [shape.vocabulary, shape.hidden]),
        "lm_head.weight": ("F16", [shape.vocabulary, shape.hidden]),
        "model.norm.weight": ("F16", [shape.hidden]),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ("F16", [shape.hidden])
        for name, k, n in (
            ("self_attn.q_proj", shape.hidden, q),
            ("self_attn.k_proj", shape.hidden, kv),
            ("self_attn.v_proj", shape.hidden, kv),
            ("self_attn.o_proj", q, shape.hidden),
            ("mlp.gate_proj", shape.hidden, shape.intermediate),
            ("mlp.up_proj", shape.hidden, shape.intermediate),
            ("mlp.down_proj", shape.intermediate, shape.hidden),
        ):
            tensors[f"{prefix}.{name}.qweight"] = ("I32", [k, n // 8])
            tensors[f"{prefix}.{name}.qzeros"] = ("I32", [k // 128, n // 8])
            tensors[f"{prefix}.{name}.scales"] = ("F16", [k // 128, n])
    header, at = {}, 0
    for name, (dtype, sizes) in tensors.items():
        size = 4 if dtype == "I32" else 2
        for length in sizes:
            size *= length
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + at)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32768,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "card_gib", "degrees"),
    [
        # 64 sequences of 4,096 tokens are 10 GiB of cache for each of 8 KV heads. Only at tp 8 has
        # every rank one head alone: at tp 7 some have two, 20 GiB, which a card of 24 cannot hold.
        ("llama-3.1-70b", 80, [2, 3, 4, 5, 6, 7, 8]),
        ("llama-3.1-70b", 24, [8]),
        ("llama-3.1-70b", 16, []),
        ("qwen2-72b", 24, [8]),
        ("qwen1.5-110b", 24, [8]),
        ("qwen1.5-110b", 141, [2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_which_degrees_fit_a_card(
    tmp_path: Path, name: str, card_gib: int, degrees: list[int]
) -> None:
    shape = replace(TRUE_SHAPES[name], layers=80, vocabulary=152064)
    model = open_stored(headers_only(tmp_path / name, shape))
    load = Load(sequences=64, context=4096, dtype_bytes=2)
    found = [tp for tp in range(1, 9) if fits(memory(model, tp, load), card_gib * GIB)]
    assert found == degrees


def test_true_sizes_of_a_70b_model(tmp_path: Path) -> None:
    shape = replace(TRUE_SHAPES["llama-3.1-70b"], layers=80, vocabulary=128256)
    model = open_stored(headers_only(tmp_path / "m", shape))
    (whole,) = memory(model, 1, Load(1, 1000, 2))
    # What a GPU was seen to hold of such a model: 37.286 GiB.
    assert whole.weights / GIB == pytest.approx(37.286, abs=0.001)
    ranks = memory(model, 8, Load(1, 1000, 2))
    assert sum(rank.weights for rank in ranks) == pytest.approx(whole.weights, rel=0.001)
    # 80 layers, keys and values, one head of 128 each, 63 blocks of 16 tokens, 2 bytes.
    assert ranks[0].kv_cache == 80 * 2 * 128 * 63 * 16 * 2
    assert kv_bytes(model, ShardPlan.make(model.config, 1, 0), Load(3, 16, 2)) == 3 * 16 * 327_680


def test_a_split_group_is_on_both_ranks(tmp_path: Path) -> None:
    shape = replace(TRUE_SHAPES["qwen2-72b"], layers=2)
    found = inspect_model(headers_only(tmp_path / "m", shape))
    first, second = (
        next(share for share in table if share.tensor == "layers.*.mlp.down_proj")
        for table in found.table(2)
    )
    assert (first.inputs, first.groups, first.first_group_offset) == (range(14784), range(116), 0)
    assert (second.inputs, second.groups) == (range(14784, 29568), range(115, 231))
    assert second.first_group_offset == 64
    assert first.layers == second.layers == 2
