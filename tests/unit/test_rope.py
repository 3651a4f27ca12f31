"""The rotary tables against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchtp.model.config import ModelConfig, RopeConfig
from batchtp.model.rope import rope_table

TRAINED = 512
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
    (
        "yarn",
        {
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.25},
    ),
    ("dynamic", {"factor": 4.0}),
]


def model_config(rope: RopeConfig) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=256,
        intermediate_size=512,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=100,
        max_position_embeddings=TRAINED,
        rms_norm_eps=1e-6,
        rope=rope,
    )


def transformers_rows(kind: str, parameters: dict[str, Any], positions: torch.Tensor) -> Any:
    """cos | sin of the positions, as one forward of that length computes them."""
    from transformers.models.llama import modeling_llama as llama

    config = llama.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_theta=10000.0,
        rope_scaling={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)


@pytest.mark.parametrize(("kind", "parameters"), KINDS)
def test_table_is_the_one_of_transformers(kind: str, parameters: dict[str, Any]) -> None:
    config = model_config(RopeConfig(10000.0, kind, **parameters))
    table = rope_table(config, TRAINED, torch.device("cpu"))
    assert table.shape == (TRAINED, 64)
    assert table.dtype == torch.float32
    wanted = transformers_rows(kind, parameters, torch.arange(TRAINED))
    torch.testing.assert_close(table, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [TRAINED, 1000, 4 * TRAINED - 1])
def test_dynamic_past_the_trained_length_is_what_a_cached_decode_computes(position: int) -> None:
    config = model_config(RopeConfig(10000.0, "dynamic", factor=4.0))
    row = rope_table(config, 4 * TRAINED, torch.device("cpu"))[position]
    wanted = transformers_rows("dynamic", {"factor": 4.0}, torch.tensor([position]))[0]
    # The angle is some thousand radians, of which float32 keeps seven digits.
    torch.testing.assert_close(row, wanted, rtol=0, atol=5e-4)
