"""Writes small model files whose every weight is known, in each format, by plain means."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# 2 heads of 20 features: the second starts in the middle of a packed word and of a group.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
LINEARS = {
    "self_attn.q_proj": (40, 64),
    "self_attn.k_proj": (40, 64),
    "self_attn.v_proj": (40, 64),
    "self_attn.o_proj": (64, 40),
    "mlp.gate_proj": (72, 64),
    "mlp.up_proj": (72, 64),
    "mlp.down_proj": (64, 72),
}


def pack(values: np.ndarray[Any, Any], bits: int, order: Iterable[int] | None = None) -> Tensor:
    """Rows of values to int32 words along the last axis."""
    per_word = 32 // bits
    places = list(range(per_word)) if order is None else list(order)
    rows, width = values.shape
    words = np.zeros((rows, -(-width // per_word)), dtype=np.uint64)
    for word in range(words.shape[1]):
        for i, place in enumerate(places):
            column = word * per_word + place
            if column < width:
                words[:, word] |= values[:, column].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


class Quantised:
    """A random quantised linear: q [k, n], zeros and scales [groups, n], a group a row."""

    def __init__(
        self,
        n: int,
        k: int,
        *,
        bits: int = 4,
        group_size: int = 32,
        sym: bool = False,
        act_order: bool = False,
        seed: int = 0,
    ) -> None:
        noise = np.random.default_rng(seed)
        size = group_size or k
        groups = -(-k // size)
        self.bits, self.n, self.k, self.sym, self.act_order = bits, n, k, sym, act_order
        self.q = noise.integers(0, 1 << bits, (k, n))
        middle = 1 << (bits - 1)
        self.zeros = (
            np.full((groups, n), middle) if sym else noise.integers(0, 1 << bits, (groups, n))
        )
        self.scales = torch.from_numpy(noise.uniform(0.01, 0.1, (groups, n))).half()
        self.index = np.arange(k) // size
        if act_order:
            noise.shuffle(self.index)

    def dense(self) -> Tensor:
        """float32 [n, k]."""
        shifted = torch.from_numpy(self.q - self.zeros[self.index]).float()
        return (shifted * self.scales.float()[self.index]).t().contiguous()

    def gptq(self, v2: bool = False) -> dict[str, Tensor]:
        zeros = pack(self.zeros, self.bits)
        if not v2:
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            wrapped = (zeros.numpy().view(np.uint32).astype(np.int64) - ones) % (1 << 32)
            zeros = torch.from_numpy(wrapped.astype(np.uint32).view(np.int32).copy())
        return {
            "qweight": pack(self.q.T, self.bits).t().contiguous(),
            "qzeros": zeros,
            "scales": self.scales,
            "g_idx": torch.from_numpy(self.index.astype(np.int32)),
        }

    def awq(self) -> dict[str, Tensor]:
        return {
            "qweight": pack(self.q, 4, AWQ_COLUMNS),
            "qzeros": pack(self.zeros, 4, AWQ_COLUMNS),
            "scales": self.scales,
        }

    def compressed(self) -> dict[str, Tensor]:
        parts = {
            "weight_packed": pack(self.q.T, self.bits),
            "weight_scale": self.scales.t().contiguous(),
            "weight_shape": torch.tensor([self.n, self.k]),
        }
        if not self.sym:
            parts["weight_zero_point"] = pack(self.zeros, self.bits).t().contiguous()
        if self.act_order:
            parts["weight_g_idx"] = torch.from_numpy(self.index.astype(np.int32))
        return parts


def quantisation(method: str, linear: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization_config for Quantised(**linear)."""
    bits, size = linear.get("bits", 4), linear.get("group_size", 32)
    sym, act_order = linear.get("sym", False), linear.get("act_order", False)
    if method == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "version": "gemm"}
    if method.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size or -1,
            "sym": sym,
            "desc_act": act_order,
            "checkpoint_format": method,
        }
    weights = {
        "num_bits": bits,
        "group_size": size or None,
        "strategy": "group" if size else "channel",
        "symmetric": sym,
        "actorder": "group" if act_order else None,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_hf(
    directory: Path,
    method: str = "",
    config: Mapping[str, Any] | None = None,
    features: int = 72,
    **linear: Any,
) -> dict[str, Tensor]:
    """A checkpoint of CONFIG's shape, but for the MLP's features; gives every weight, dense:
    linears [n, k].
    """
    noise = torch.Generator().manual_seed(1)
    dense: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, shape in plain_tensors().items():
        dense[name] = stored[name] = torch.randn(shape, generator=noise)
    for i, (part, (n, k)) in enumerate(linears(features).items()):
        module = f"model.layers.0.{part}"
        if method:
            # q, k and v see the same inputs, and so do gate and up: one act-order for them all.
            made = Quantised(n, k, seed=0 if k == 64 else i, **linear)
            dense[f"{module}.weight"] = made.dense()
            parts = {
                "awq": made.awq,
                "gptq": made.gptq,
                "gptq_v2": lambda made=made: made.gptq(v2=True),
                "compressed-tensors": made.compressed,
            }[method]()
            stored |= {f"{module}.{key}": value.contiguous() for key, value in parts.items()}
        else:
            weight = torch.randn((n, k), generator=noise)
            dense[f"{module}.weight"] = stored[f"{module}.weight"] = weight
    write_tensors(directory, stored)
    write_config(directory, method, linear, {"intermediate_size": features, **(config or {})})
    return dense


def linears(features: int = 72) -> dict[str, tuple[int, int]]:
    """LINEARS with another number of features in the MLP."""
    swap = {72: features}
    return {name: (swap.get(n, n), swap.get(k, k)) for name, (n, k) in LINEARS.items()}


def plain_tensors() -> dict[str, tuple[int, ...]]:
    """The shapes of what is never quantised."""
    return {
        "model.embed_tokens.weight": (40, 64),
        "lm_head.weight": (40, 64),
        "model.norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.post_attention_layernorm.weight": (64,),
    }


def write_config(
    directory: Path, method: str, linear: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    config = {**CONFIG, **changes}
    if method:
        config["quantization_config"] = quantisation(method, linear)
    (directory / "config.json").write_text(json.dumps(config))


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A key's type and value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    items = [gguf_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def write_gguf(
    path: Path, keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]
) -> None:
    """`tensors`: type number, shape with the outermost first, data."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for name, value in keys.items():
        head += gguf_string(name) + gguf_value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        head += gguf_string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
