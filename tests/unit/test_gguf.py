"""GGUF files: the header, every block type, and the order of q's and k's rows."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import write_gguf
from torch import Tensor

from batchtp.errors import CheckpointError, UnsupportedModelError
from batchtp.kernels.weights import Int4Weight, ZeroKind, dequantize
from batchtp.model.config import load_config
from batchtp.model.gguf import open_gguf
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan

CPU = torch.device("cpu")
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
HIDDEN, HEADS, HEAD_DIM, FEATURES, VOCAB = 64, 2, 48, 96, 40
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEATURES,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": 1,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b", "é"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
}
Q, KV = HEADS * HEAD_DIM, HEAD_DIM
SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (Q, HIDDEN),
    "blk.0.attn_k": (KV, HIDDEN),
    "blk.0.attn_v": (KV, HIDDEN),
    "blk.0.attn_output": (HIDDEN, Q),
    "blk.0.ffn_gate": (FEATURES, HIDDEN),
    "blk.0.ffn_up": (FEATURES, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FEATURES),
}


def blocks(kind: int, shape: tuple[int, ...], seed: int) -> tuple[bytes, Tensor]:
    """A random tensor of a type: its bytes, and its values in float32."""
    noise = np.random.default_rng(seed)
    if kind in (F32, F16, BF16):
        dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
        values = torch.from_numpy(noise.normal(size=shape)).to(dtype)
        return values.view(torch.uint8).numpy().tobytes(), values.float()
    count = int(np.prod(shape)) // 32
    scales = noise.uniform(0.01, 0.1, count).astype(np.float16)
    minima = noise.uniform(-1, 0, count).astype(np.float16)
    q = (
        noise.integers(-128, 128, (count, 32))
        if kind == Q8_0
        else noise.integers(0, 16, (count, 32))
    )
    raw = b""
    for i in range(count):
        raw += struct.pack("<e", scales[i])
        if kind == Q4_1:
            raw += struct.pack("<e", minima[i])
        if kind == Q8_0:
            raw += q[i].astype(np.int8).tobytes()
        else:
            raw += (q[i, :16] | (q[i, 16:] << 4)).astype(np.uint8).tobytes()
    wide = q.astype(np.float32)
    scale = scales.astype(np.float32)[:, None]
    if kind == Q4_0:
        wide = (wide - 8) * scale
    elif kind == Q4_1:
        wide = wide * scale + minima.astype(np.float32)[:, None]
    else:
        wide = wide * scale
    return raw, torch.from_numpy(wide.reshape(shape))


def write_model(path: Path, kind: int, **changes: Any) -> dict[str, Tensor]:
    """A model whose matrices have a type; gives their values as stored."""
    stored, values = {}, {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        own = F32 if len(shape) == 1 else kind
        raw, values[name] = blocks(own, shape, seed)
        stored[f"{name}.weight"] = (own, shape, raw)
    write_gguf(path, {**KEYS, **changes}, stored)
    return values


def in_order(stored: Tensor) -> Tensor:
    """Row 2 j + half of a head, as llama.cpp stores it, is row half * size / 2 + j of the head."""
    rows = [
        head * HEAD_DIM + 2 * (i % (HEAD_DIM // 2)) + i // (HEAD_DIM // 2)
        for head in range(stored.shape[0] // HEAD_DIM)
        for i in range(HEAD_DIM)
    ]
    return stored[rows]


def dense(weight: Any) -> Tensor:
    return dequantize(weight).t() if isinstance(weight, Int4Weight) else weight


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", [F32, F16, BF16, Q4_0, Q4_1, Q8_0])
def test_every_type_at_every_degree(tmp_path: Path, kind: int, tp: int) -> None:
    path = tmp_path / "model.gguf"
    values = write_model(path, kind)
    config = load_config(path)
    for rank in range(tp):
        plan = ShardPlan.make(config, tp, rank)
        got = load_shard(path, config, plan, torch.float32, CPU)
        vocab = slice(plan.vocab.start, plan.vocab.stop)
        assert torch.equal(got["embed"], values["token_embd"][vocab])
        assert torch.equal(dense(got["lm_head"]), values["output"][vocab])
        run = slice(plan.intermediate.start, plan.intermediate.stop)
        up = torch.cat([values["blk.0.ffn_gate"][run], values["blk.0.ffn_up"][run]])
        assert torch.equal(dense(got["layers.0.gate_up"]), up)
        assert torch.equal(dense(got["layers.0.down"]), values["blk.0.ffn_down"][:, run])
        heads = slice(plan.q_heads.start * HEAD_DIM, plan.q_heads.stop * HEAD_DIM)
        if plan.q_heads:
            q, k = in_order(values["blk.0.attn_q"])[heads], in_order(values["blk.0.attn_k"])
            qkv = torch.cat([q, k, values["blk.0.attn_v"]])
            assert torch.equal(dense(got["layers.0.qkv"]), qkv)
            assert torch.equal(dense(got["layers.0.o"]), values["blk.0.attn_output"][:, heads])


def test_a_minimum_stays_a_minimum(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", Q4_1)
    config = load_config(tmp_path / "model.gguf")
    plan = ShardPlan.make(config, 2, 1)
    down = load_shard(tmp_path / "model.gguf", config, plan, torch.float32, CPU)["layers.0.down"]
    assert isinstance(down, Int4Weight)
    assert (down.zero_kind, down.zeros.dtype) == (ZeroKind.MINIMUM, torch.float16)


def test_qwen2_rows_are_in_order_already(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = {key.replace("llama.", "qwen2."): value for key, value in KEYS.items()}
    values = write_model(path, F16, **{**keys, "general.architecture": "qwen2"})
    config = load_config(path)
    assert config.architecture == "Qwen2ForCausalLM"
    got = load_shard(path, config, ShardPlan.make(config, 1, 0), torch.float32, CPU)
    assert torch.equal(got["layers.0.qkv"][:Q], values["blk.0.attn_q"])


def test_config_from_keys_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, F16)
    config = load_config(path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, 48)
    assert config.vocab_size == VOCAB
    assert config.eos_token_ids == {1, 2}
    assert not config.tie_word_embeddings
    assert not config.attention_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba is not supported"),
        ({"split.count": 2}, "one part of a split model"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 24}, "rotary embedding of 24 of 48"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_model(tmp_path / "model.gguf", F16, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_config(tmp_path / "model.gguf")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", KEYS, {"token_embd.weight": (12, (1, 256), bytes(144))})
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight has type Q4_K"):
        open_gguf(tmp_path / "model.gguf")


def test_every_cut_and_every_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, Q4_0)
    whole = path.read_bytes()
    for keep in [3, 10, 24, 60, 500, 1200, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"cut short|not a GGUF"):
            open_gguf(path)
    for content in (b"", b"PK\3\4" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            open_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1))
    with pytest.raises(CheckpointError, match="corrupt: a count"):
        open_gguf(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, F16, **{"llama.feed_forward_length": 128})
    config = load_config(path)
    with pytest.raises(CheckpointError, match=r"ffn_gate\.weight in .* has shape \[96, 64\]"):
        load_shard(path, config, ShardPlan.make(config, 1, 0), torch.float32, CPU)


def llama3_divisors(factor: float, theta: float) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes, frequency by frequency."""
    found = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_llama3_scaling_is_recognised_and_any_other_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        stored[f"{name}.weight"] = (F32, shape, blocks(F32, shape, seed)[0])
    divisors = llama3_divisors(8.0, 500000.0)
    keys = {**KEYS, "llama.rope.freq_base": 500000.0}
    for rope, fine in ((divisors, True), (divisors * 2, False)):
        freqs = {"rope_freqs.weight": (F32, (HEAD_DIM // 2,), rope.tobytes())}
        write_gguf(path, keys, {**stored, **freqs})
        if fine:
            rope_config = load_config(path).rope
            assert (rope_config.kind, rope_config.factor) == ("llama3", 8.0)
            assert rope_config.original_max_position_embeddings == 8192
        else:
            with pytest.raises(UnsupportedModelError, match="not Llama 3's scaling"):
                load_config(path)
