"""The decoder against what other people's code computes, at several TP degrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_driver import DATA, all_checkpoints, generate, part

from batchtp.testing.thread_group import ThreadedRunners
from batchtp.worker.messages import Plan

ATOL = 1e-4
OWN = [path for path in all_checkpoints() if path.parent == DATA]


def named(path: Path) -> str:
    return path.name


def expected(checkpoint: Path) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """Prompts, greedy ids and the logits after each prompt."""
    prompts = json.loads((checkpoint / "expected.json").read_text())["prompts"]
    arrays = np.load(checkpoint / "expected_logits.npz")
    logits = [torch.from_numpy(arrays[f"prompt{i}_last_logits"]) for i in range(len(prompts))]
    return [p["ids"] for p in prompts], [p["greedy_ids"] for p in prompts], logits


def prompt_slices(prompts: list[list[int]]) -> tuple[Any, ...]:
    return tuple(part(i, ids, 0, range(4 * i, 4 * i + 4)) for i, ids in enumerate(prompts))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("checkpoint", all_checkpoints(), ids=named)
def test_logits_and_greedy_ids_of_every_checkpoint(checkpoint: Path, tp: int) -> None:
    prompts, greedy, logits = expected(checkpoint)
    runners = ThreadedRunners(checkpoint, tp)
    got = runners.logits(prompt_slices(prompts))
    for row, wanted in zip(got, logits, strict=True):
        assert (row - wanted).abs().max() < ATOL
    assert generate(runners.step, prompts, len(greedy[0])) == greedy


@pytest.mark.parametrize("tp", [3, 8])
@pytest.mark.parametrize("checkpoint", OWN, ids=named)
def test_uneven_and_empty_shares(checkpoint: Path, tp: int) -> None:
    prompts, _, logits = expected(checkpoint)
    got = ThreadedRunners(checkpoint, tp).logits(prompt_slices(prompts))
    for row, wanted in zip(got, logits, strict=True):
        assert (row - wanted).abs().max() < ATOL


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_gives_the_same_tokens(chunk: int) -> None:
    prompts, greedy, _ = expected(OWN[0])
    assert generate(ThreadedRunners(OWN[0], 2).step, prompts, 24, chunk=chunk) == greedy


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_size_does_not_matter(block_size: int) -> None:
    prompts, greedy, _ = expected(OWN[0])
    runners = ThreadedRunners(OWN[0], 1, blocks=128, block_size=block_size)
    assert generate(runners.step, prompts, 24, block_size=block_size) == greedy


def test_batch_of_32_gives_what_each_gets_alone() -> None:
    noise = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, 300, (length,), generator=noise).tolist() for length in range(2, 34)
    ]
    runners = ThreadedRunners(OWN[0], 1, blocks=160)
    for sampling in ({}, {"temperature": 0.8, "top_p": 0.95}):
        together = generate(runners.step, prompts, 8, **sampling)
        alone = [
            generate(runners.step, prompts[: i + 1][-1:], 8, seed=i, **sampling)[0]
            for i in range(0, 32, 5)
        ]
        assert together[::5] == alone


def test_a_sequence_with_bad_logits_is_named_and_hurts_no_other() -> None:
    # Not tied: a bad embedding is not also a bad column of every row's logits.
    untied = DATA / "ct-gptq-actgroup-g64"
    prompts, greedy, _ = expected(untied)
    runners = ThreadedRunners(untied, 1)
    runners.decoders[0].embed.rows[prompts[0][-1]] = torch.nan
    drawn = runners.runners[0].step(Plan(1, 1, prompt_slices(prompts)))
    assert drawn.bad == (0,)
    assert dict(drawn.tokens) == {1: greedy[1][0]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_within_the_checkpoint_tolerance(dtype: torch.dtype) -> None:
    prompts, greedy, logits = expected(OWN[0])
    facts = json.loads((OWN[0] / "expected.json").read_text())
    half = "fp16" if dtype == torch.float16 else "bf16"
    atol = 3 * facts["measured_max_abs_logit_difference"][f"whole_model_{half}"]
    runners = ThreadedRunners(OWN[0], 2, dtype=dtype)
    for row, wanted in zip(runners.logits(prompt_slices(prompts)), logits, strict=True):
        assert (row - wanted).abs().max() < atol
    assert generate(runners.step, prompts, 24) == greedy


def test_seeded_draws_are_the_same_at_another_degree() -> None:
    prompts, _, _ = expected(OWN[0])
    one, two = (
        generate(ThreadedRunners(OWN[0], tp).step, prompts, 12, temperature=1.0, top_k=50)
        for tp in (1, 2)
    )
    assert one == two
    assert one[0] != one[1]
