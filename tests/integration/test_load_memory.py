"""A rank's memory while it loads: its shard, and little beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_files import CONFIG
from safetensors.torch import save_file

PEER = Path(__file__).parent / "load_memory_peer.py"
HIDDEN, INTERMEDIATE, LAYERS, GROUP = 1024, 2816, 24, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, 256),
    "self_attn.v_proj": (HIDDEN, 256),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random AWQ checkpoint of 130 MB."""
    folder = tmp_path_factory.mktemp("awq")
    config = CONFIG | {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1000,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros((1000, HIDDEN), dtype=torch.float16),
        "lm_head.weight": torch.zeros((1000, HIDDEN), dtype=torch.float16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.float16),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
        for name, (k, n) in SHAPES.items():
            words = torch.randint(-(2**31), 2**31, (k + k // GROUP, n // 8), dtype=torch.int32)
            tensors[f"{prefix}.{name}.qweight"] = words[:k].contiguous()
            tensors[f"{prefix}.{name}.qzeros"] = words[k:].contiguous()
            tensors[f"{prefix}.{name}.scales"] = torch.ones((k // GROUP, n), dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (3, 0)])
def test_the_peak_of_a_load_is_little_more_than_the_shard(
    checkpoint: Path, tp: int, rank: int
) -> None:
    command = [sys.executable, str(PEER), str(checkpoint), str(tp), str(rank)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found["shard"] > 20e6
    assert found["risen"] <= 1.3 * found["shard"], found
