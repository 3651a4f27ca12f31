"""Random int4 AWQ checkpoints of any shape, as AutoAWQ lays them out.

Scales are such that an input of unit variance gives an output of about unit variance, so that
nothing comes near the range of float16.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

GROUP_ROWS = 128
# The standard deviation of a nibble less a zero point of 7 or 8.
_NIBBLE_DEVIATION = 4.64


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. `qkv_bias`: of the Qwen2 family, else of the Llama family."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1
    vocabulary: int = 1024
    qkv_bias: bool = False


# One layer each of models whose shards other engines got wrong.
LLAMA_70B = Shape(8192, 28672, 64, 8, 128)
QWEN2_72B = Shape(8192, 29568, 64, 8, 128, qkv_bias=True)
QWEN2_72B_PADDED = Shape(8192, 29696, 64, 8, 128, qkv_bias=True)
QWEN15_110B = Shape(8192, 49152, 64, 8, 128, qkv_bias=True)
TRUE_SHAPES = {
    "llama-3.1-70b": LLAMA_70B,
    "qwen2-72b": QWEN2_72B,
    "qwen2-72b-padded": QWEN2_72B_PADDED,
    "qwen1.5-110b": QWEN15_110B,
}


def write_random_awq(directory: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
    """Write a checkpoint without a tokenizer: config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator(device).manual_seed(seed)
    tensors = _plain(shape, noise)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(shape.hidden, dtype=torch.float16)
        for name, (k, n) in _linears(shape).items():
            tensors |= _linear(f"{prefix}.{name}", k, n, noise)
            if shape.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
                bias = torch.randn(n, generator=noise, device=noise.device) / 2
                tensors[f"{prefix}.{name}.bias"] = bias.half().cpu()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(shape)))


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP_ROWS,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
    }


def _plain(shape: Shape, noise: torch.Generator) -> dict[str, Tensor]:
    size = (shape.vocabulary, shape.hidden)
    embed = torch.randn(size, generator=noise, device=noise.device)
    head = torch.randn(size, generator=noise, device=noise.device) / math.sqrt(shape.hidden)
    return {
        "model.embed_tokens.weight": embed.half().cpu(),
        "lm_head.weight": head.half().cpu(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.float16),
    }


def _linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linears."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (shape.hidden, q),
        "self_attn.k_proj": (shape.hidden, kv),
        "self_attn.v_proj": (shape.hidden, kv),
        "self_attn.o_proj": (q, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.intermediate),
        "mlp.up_proj": (shape.hidden, shape.intermediate),
        "mlp.down_proj": (shape.intermediate, shape.hidden),
    }


def _linear(module: str, k: int, n: int, noise: torch.Generator) -> dict[str, Tensor]:
    def words(rows: int) -> Tensor:
        size = (rows, n // 8)
        return torch.randint(
            -(2**31), 2**31, size, dtype=torch.int32, generator=noise, device=noise.device
        )

    groups = -(-k // GROUP_ROWS)
    scale = 1 / (_NIBBLE_DEVIATION * math.sqrt(k))
    scales = torch.rand((groups, n), generator=noise, device=noise.device) * 0.4 + 0.8
    # Zero points of 7 and 8: no nibble carries into the next.
    zeros = (words(groups) & 0x11111111) + 0x77777777
    return {
        f"{module}.qweight": words(k).cpu(),
        f"{module}.qzeros": zeros.cpu(),
        f"{module}.scales": (scales * scale).half().cpu(),
    }
