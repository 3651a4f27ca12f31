"""The sampler: right distributions, and rows that do not know of each other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from batchtp.worker import sampler
from batchtp.worker.sampler import Draw, sample

GREEDY = Draw(temperature=0.0, top_p=1.0, top_k=0, seed=0, position=0)
PLAIN = replace(GREEDY, temperature=1.0)


def draws(logits: list[float], draw: Draw, count: int) -> Counter[int | None]:
    rows = torch.tensor([logits]).repeat(count, 1)
    return Counter(sample(rows, [replace(draw, position=i) for i in range(count)]))


def test_greedy_takes_the_first_maximum() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [GREEDY]) == [1]


def test_nothing_to_draw() -> None:
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits, count = [0.0, 1.0, -1.0, 2.0, 0.5], 20_000
    seen = draws(logits, replace(PLAIN, temperature=temperature), count)
    expected = (torch.tensor(logits) / temperature).softmax(0).tolist()
    chi2 = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected))
    # The 99.9th percentile of chi-square with 4 degrees of freedom.
    assert chi2 < 18.47


def test_frequencies_over_seeds_and_a_wide_vocabulary() -> None:
    vocab, count = 50_000, 400
    logits = torch.zeros(count, vocab)
    logits[:, vocab // 2 :] = math.log(3)
    tokens = sample(logits, [replace(PLAIN, seed=i) for i in range(count)])
    upper = sum(1 for token in tokens if token is not None and token >= vocab // 2)
    # Binomial(400, 3/4): four standard deviations are 35.
    assert abs(upper - 300) < 35
    assert len(set(tokens)) > 380


def test_top_k_keeps_the_k_best() -> None:
    seen = draws([1.0, 3.0, 2.0, 2.5], replace(PLAIN, temperature=5.0, top_k=2), 500)
    assert set(seen) == {1, 3}


def test_top_k_one_is_greedy() -> None:
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(1))
    drawn = sample(logits, [replace(PLAIN, top_k=1, seed=i) for i in range(16)])
    assert drawn == logits.argmax(1).tolist()


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.3, 0.1)]
    assert set(draws(logits, replace(PLAIN, top_p=0.49), 300)) == {1}
    assert set(draws(logits, replace(PLAIN, top_p=0.6), 300)) == {1, 2}
    assert set(draws(logits, replace(PLAIN, top_p=0.85), 500)) == {0, 1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    # Of the two that top-k leaves, the first alone has 0.625.
    assert set(draws(logits, replace(PLAIN, top_k=2, top_p=0.6), 300)) == {0}
    assert set(draws(logits, replace(PLAIN, top_k=2, top_p=0.7), 300)) == {0, 1}


def test_a_tiny_top_p_keeps_the_best() -> None:
    assert set(draws([0.0, 1.0, 0.5], replace(PLAIN, top_p=1e-9), 50)) == {1}


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(draws([90.0, 91.0, -300.0], replace(PLAIN, temperature=1e-40), 50)) == {1}


def test_same_seed_and_position_same_token() -> None:
    logits = torch.zeros(1, 1000)
    draw = replace(PLAIN, seed=7, position=11)
    assert sample(logits, [draw]) == sample(logits, [draw])
    others = [replace(draw, seed=8), replace(draw, position=12), replace(draw, seed=-7)]
    assert all(sample(logits, [other]) != sample(logits, [draw]) for other in others)


@pytest.mark.parametrize("vocab", [391, 4099])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int) -> None:
    logits = 3 * torch.randn(32, vocab, generator=torch.Generator().manual_seed(0))
    mixed = [
        Draw(
            temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
            top_p=(1.0, 0.9, 0.3)[i % 3],
            top_k=(0, 40, 5, 0, 1)[i % 5],
            seed=1000 + i,
            position=i,
        )
        for i in range(32)
    ]
    together = sample(logits, mixed)
    alone = [sample(logits[i : i + 1].clone(), [draw])[0] for i, draw in enumerate(mixed)]
    backwards = sample(logits.flip(0), mixed[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("draw", [GREEDY, replace(PLAIN, top_p=0.9)])
def test_a_bad_row_hurts_itself_alone(poison: float, draw: Draw) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    wanted = sample(logits, [draw] * 3)
    logits[1, 17] = poison
    assert sample(logits, [draw] * 3) == [wanted[0], None, wanted[2]]


def kept_by_definition(scores: torch.Tensor, draw: Draw) -> set[int]:
    """Sort the whole vocabulary, in float64, ties by id."""
    order = sorted(range(len(scores)), key=lambda t: (-float(scores[t]), t))
    order = order[: draw.top_k or None]
    weights = scores.double()[order].softmax(0)
    before = weights.cumsum(0) - weights
    return {t for t, b in zip(order, before.tolist(), strict=True) if b < draw.top_p - 1e-9}


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (40, 0.9), (40, 1.0), (1500, 0.6), (1500, 1.0)]
)
def test_filter_keeps_what_the_definition_says(top_k: int, top_p: float, spread: float) -> None:
    noise = torch.Generator().manual_seed(4)
    # Coarse values: many ties, also at the border.
    scores = (spread * torch.randn(3, 3000, generator=noise) * 4).round() / 4
    scores -= scores.amax(1, keepdim=True)
    draw = replace(PLAIN, top_k=top_k, top_p=top_p)
    kept = sampler._filter(scores, [draw] * 3).isfinite()
    for row, mask in zip(scores, kept, strict=True):
        assert set(mask.nonzero()[:, 0].tolist()) == kept_by_definition(row, draw)
