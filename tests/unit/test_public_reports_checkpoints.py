"""Checkpoints that other systems refused or got silently wrong, each as a small reproduction.

The names are of public reports; what they have in common is in docs/checkpoints.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import Quantised, linears, write_config, write_gguf, write_hf, write_tensors
from rank_driver import DATA, generate, part
from safetensors.torch import load_file
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.weights import Int4Weight, dequantize
from batchtp.model.config import load_config
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan
from batchtp.testing.thread_group import ThreadedRunners

CPU = torch.device("cpu")
PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8, 9, 7, 9, 3]]
LAYER = "model.layers.0"


def shards(path: Path, tp: int) -> list[dict[str, Any]]:
    config = load_config(path)
    return [
        load_shard(path, config, ShardPlan.make(config, tp, rank), torch.float32, CPU)
        for rank in range(tp)
    ]


def logits(path: Path, tp: int = 1) -> Tensor:
    group = ThreadedRunners(path, tp, max_model_len=64)
    slices = tuple(part(i, ids, 0, [i]) for i, ids in enumerate(PROMPTS))
    return group.logits(slices, everywhere=True)


def tokens(path: Path, tp: int = 1) -> list[list[int]]:
    return generate(ThreadedRunners(path, tp, max_model_len=64).step, PROMPTS, 12)


def assert_same_text(path: Path, degrees: tuple[int, ...]) -> None:
    """Logits within rounding of TP 1's, and the same greedy tokens."""
    one = logits(path)
    assert one.isfinite().all()
    for tp in degrees:
        assert (logits(path, tp) - one).abs().max() < 1e-4 * one.abs().max(), tp
        assert tokens(path, tp) == tokens(path), tp


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a checkpoint's tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()})


def configure(path: Path, **changes: Any) -> None:
    """Change a checkpoint's config; `quantization` amends its quantization_config."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.get("quantization_config", {}).update(changes.pop("quantization", {}))
    file.write_text(json.dumps(config | changes))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_row_parallel_awq_shard_is_a_slice_of_the_whole(tmp_path: Path, tp: int) -> None:
    """sgl-project/sglang#2829: the whole of down_proj was copied into a shard."""
    known = write_hf(tmp_path, "awq")
    for name, theirs in (("down", "mlp.down_proj"), ("o", "self_attn.o_proj")):
        whole = known[f"{LAYER}.{theirs}.weight"]
        first = 0
        for tensors in shards(tmp_path, tp):
            weight = tensors.get(f"layers.0.{name}")
            if weight is None:
                continue
            assert isinstance(weight, Int4Weight)
            assert weight.k < whole.shape[1]
            wanted = whole[:, first : first + weight.k].t()
            assert torch.equal(dequantize(weight), wanted)
            first += weight.k
        assert first == whole.shape[1]
    assert_same_text(tmp_path, (tp,))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_eleven_groups_over_two_ranks_are_six_and_five(tmp_path: Path, method: str) -> None:
    """QwenLM/Qwen3#698, vllm-project/vllm#5675 and a GPTQ model card: refused, or '!!!!'."""
    write_hf(tmp_path, method, features=11 * 32)
    downs = [tensors["layers.0.down"] for tensors in shards(tmp_path, 2)]
    assert [down.scales.shape[0] for down in downs] == [6, 5]
    assert_same_text(tmp_path, (2, 4, 8))


def test_groups_that_no_degree_divides(tmp_path: Path) -> None:
    """The same kind: 231 = 3 * 7 * 11 groups in miniature, with a group on two ranks."""
    write_hf(tmp_path, "awq", features=7 * 32 + 8)
    downs = [tensors["layers.0.down"] for tensors in shards(tmp_path, 2)]
    assert any(down.first_group_offset for down in downs)
    assert_same_text(tmp_path, (2, 3, 4, 5, 8))


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "compressed-tensors"])
def test_act_order_indexes_the_full_scales(tmp_path: Path, method: str) -> None:
    """vllm-project/vllm#7374: desc_act at TP 2 gave nonsense."""
    write_hf(tmp_path, method, act_order=True)
    for tensors in shards(tmp_path, 2):
        down = tensors["layers.0.down"]
        assert down.group_index is not None
        assert down.scales.shape[0] == 3
    assert_same_text(tmp_path, (2, 3, 8))


def test_symmetric_gptq_zeros_are_told_apart_whatever_the_config_says(tmp_path: Path) -> None:
    """vllm-project/vllm#26343, #38966: v2 zeros read as v1, and files that name the wrong one."""
    found = []
    for stored in ("gptq", "gptq_v2"):
        for said in ("gptq", "gptq_v2"):
            path = tmp_path / f"{stored}-{said}"
            write_hf(path, stored, sym=True)
            configure(path, quantization={"checkpoint_format": said})
            found.append(logits(path))
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("method", ["", "awq", "gptq", "compressed-tensors"])
def test_each_rank_has_its_own_slices(tmp_path: Path, method: str) -> None:
    """vllm-project/vllm-gguf-plugin#103: every rank kept rank 0's shard."""
    known = write_hf(tmp_path, method)
    assert_own_slices(shards(tmp_path, 2), known)


def test_each_rank_has_its_own_slices_of_a_gguf_file(tmp_path: Path) -> None:
    """vllm-project/vllm-gguf-plugin#103, in the format it was about."""
    known = write_hf(tmp_path / "hf", "")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        f"{LAYER}.input_layernorm": "blk.0.attn_norm",
        f"{LAYER}.post_attention_layernorm": "blk.0.ffn_norm",
        **{f"{LAYER}.self_attn.{p}_proj": f"blk.0.attn_{p}" for p in "qkv"},
        f"{LAYER}.self_attn.o_proj": "blk.0.attn_output",
        **{f"{LAYER}.mlp.{p}_proj": f"blk.0.ffn_{p}" for p in ("gate", "up", "down")},
    }
    keys = {
        "general.architecture": "qwen2",
        "qwen2.block_count": 1,
        "qwen2.embedding_length": 64,
        "qwen2.feed_forward_length": 72,
        "qwen2.attention.head_count": 2,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.key_length": 20,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
        "qwen2.context_length": 128,
        "qwen2.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
        "tokenizer.ggml.eos_token_id": 1,
    }
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    for name, theirs in names.items():
        weight = known[f"{name}.weight"]
        tensors[f"{theirs}.weight"] = (0, tuple(weight.shape), weight.numpy().tobytes())
    for p in "qkv":
        tensors[f"blk.0.attn_{p}.bias"] = (0, (40,), bytes(160))
    write_gguf(tmp_path / "model.gguf", keys, tensors)
    assert_own_slices(shards(tmp_path / "model.gguf", 2), known)


def assert_own_slices(ranks: list[dict[str, Any]], known: Mapping[str, Tensor]) -> None:
    """q, k, v, gate and up of two ranks: a half each, and not the same one."""

    def dense(weight: Any) -> Tensor:
        return dequantize(weight).t() if isinstance(weight, Int4Weight) else weight

    for name, parts, sizes in (
        ("qkv", [f"self_attn.{p}_proj" for p in "qkv"], (20, 20)),
        ("gate_up", ["mlp.gate_proj", "mlp.up_proj"], (40, 32)),
    ):
        for rank, (tensors, size) in enumerate(zip(ranks, sizes, strict=True)):
            first = sum(sizes[:rank])
            mine = dense(tensors[f"layers.0.{name}"]).split(size)
            for part_name, piece in zip(parts, mine, strict=True):
                whole = known[f"{LAYER}.{part_name}.weight"]
                assert torch.equal(piece, whole[first : first + size]), part_name
                other = whole[: len(piece)] if rank else whole[-len(piece) :]
                assert not torch.equal(piece, other), part_name


@pytest.mark.parametrize("extra", ["weight", "quantised"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_head_beside_a_tied_embedding_is_ignored(tmp_path: Path, extra: str, tp: int) -> None:
    """sgl-project/sglang#2935: KeyError lm_head.weight."""
    write_hf(tmp_path, "gptq", {"tie_word_embeddings": True})
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    wanted = logits(tmp_path, tp)

    def add(tensors: dict[str, Tensor]) -> None:
        if extra == "weight":
            tensors["lm_head.weight"] = torch.full((40, 64), 9.0)
        else:
            head = Quantised(40, 64, seed=99)
            tensors.update({f"lm_head.{name}": value for name, value in head.gptq().items()})

    rewrite(tmp_path, add)
    assert torch.equal(logits(tmp_path, tp), wanted)


@pytest.mark.parametrize(
    "skipped",
    [
        [f"{LAYER}.self_attn", "lm_head"],
        [f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.self_attn.o_proj", "lm_head"],
        [f"{LAYER}.mlp.gate_up_proj", "lm_head"],
        ["o_proj"],
        None,
    ],
)
def test_modules_that_are_not_converted(tmp_path: Path, skipped: list[str] | None) -> None:
    """sgl-project/sglang#13594: the list's names, also of fused modules, were not matched."""
    known = write_hf(tmp_path, "awq")
    wanted = {tp: logits(tmp_path, tp) for tp in (1, 2)}
    plain = [
        name
        for name in linears()
        if any(_names(entry, f"{LAYER}.{name}") for entry in skipped or ["gate_proj"])
    ]
    assert plain

    def unquantise(tensors: dict[str, Tensor]) -> None:
        for name in plain:
            for key in ("qweight", "qzeros", "scales"):
                del tensors[f"{LAYER}.{name}.{key}"]
            tensors[f"{LAYER}.{name}.weight"] = known[f"{LAYER}.{name}.weight"]

    rewrite(tmp_path, unquantise)
    configure(tmp_path, quantization={"modules_to_not_convert": skipped})
    for tp, expected in wanted.items():
        assert (logits(tmp_path, tp) - expected).abs().max() < 1e-4


def _names(entry: str, module: str) -> bool:
    """Whether an entry of the list means this module, fused names taken apart."""
    fused = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
    head, _, last = entry.rpartition(".")
    if last in fused:
        return module in [f"{head}.{part}_proj" for part in fused[last]]
    return entry in module


def test_greedy_runs_repeat_byte_for_byte() -> None:
    """vllm-project/vllm#6258: wrong and not repeatable at TP 2 and 4."""
    path = DATA / "gptq-asym-g32-zero0"
    for tp in (2, 4):
        group = ThreadedRunners(path, tp, max_model_len=64)
        runs = []
        for _ in range(5):
            slices = tuple(part(i, ids, 0, [i]) for i, ids in enumerate(PROMPTS))
            runs.append(group.logits(slices, everywhere=True).numpy().tobytes())
        assert len(set(runs)) == 1


def test_a_quantised_file_without_a_config_is_refused(tmp_path: Path) -> None:
    """Never silent: packed words are not weights."""
    write_hf(tmp_path, "awq")
    write_config(tmp_path, "", {}, {})
    with pytest.raises(CheckpointError, match=r"has no tensor .*q_proj\.weight"):
        shards(tmp_path, 1)
