"""Random small models of each family, computed by transformers and by the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_driver import part

from batchtp.testing.thread_group import ThreadedRunners

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 203,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]], list[torch.Tensor]]:
    """A saved checkpoint, prompts, and the logits after each prompt."""
    import transformers

    name, changes = FAMILIES[request.param]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    torch.manual_seed(len(request.param))
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    # Trained norms and biases are not ones and zeros.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    noise = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 203, (n,), generator=noise).tolist() for n in (1, 23, 60)]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    return folder, prompts, logits


@pytest.mark.parametrize("tp", [1, 2, 4, 7])
def test_logits_are_those_of_transformers(
    family: tuple[Path, list[list[int]], list[torch.Tensor]], tp: int
) -> None:
    folder, prompts, wanted = family
    runners = ThreadedRunners(folder, tp)
    slices = [part(i, ids, 0, range(4 * i, 4 * i + 4)) for i, ids in enumerate(prompts)]
    for row, reference in zip(runners.logits(tuple(slices)), wanted, strict=True):
        assert (row - reference).abs().max() < 1e-4 * max(1.0, float(reference.abs().max()))


def test_windows_hold_over_chunks_and_decode(
    family: tuple[Path, list[list[int]], list[torch.Tensor]],
) -> None:
    folder, prompts, wanted = family
    runners = ThreadedRunners(folder, 2)
    ids, blocks = prompts[2], range(4)
    runners.step((part(0, ids[:40], 0, blocks, sample=False),))
    runners.step((part(0, ids[40:41], 40, blocks, sample=False),))
    row = runners.logits((part(0, ids[41:], 41, blocks),))[0]
    assert (row - wanted[2]).abs().max() < 1e-4 * max(1.0, float(wanted[2].abs().max()))
