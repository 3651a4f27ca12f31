"""Who owns what: whatever the shape and the degree, everything is owned, and rightly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtp.model.config import ModelConfig, RopeConfig
from batchtp.model.sharding import ShardPlan, deal

DEGREES = st.integers(1, 8)


def config(heads: int, kv_heads: int, features: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=features,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        vocab_size=vocab,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
    )


@given(st.integers(0, 5000), st.integers(1, 12), st.integers(1, 64))
def test_deal_gives_everything_once_in_whole_units(total: int, parts: int, unit: int) -> None:
    runs = deal(total, parts, unit)
    assert len(runs) == parts
    assert runs[0].start == 0
    assert runs[-1].stop == total
    assert all(a.stop == b.start for a, b in pairwise(runs))
    assert all(run.start % unit == 0 for run in runs if run)
    owned = [len(run) // unit for run in runs]
    assert max(owned) - min(owned) <= 1
    assert owned == sorted(owned, reverse=True)


@pytest.mark.parametrize(
    ("total", "parts", "unit", "lengths"),
    [
        (9, 2, 1, [5, 4]),
        (3, 8, 1, [1, 1, 1, 0, 0, 0, 0, 0]),
        (5, 3, 8, [5, 0, 0]),
        (20, 3, 8, [8, 12, 0]),
        (231 * 128, 8, 32, [3712, 3712, 3712, 3712, 3680, 3680, 3680, 3680]),
    ],
)
def test_deal_by_example(total: int, parts: int, unit: int, lengths: list[int]) -> None:
    assert [len(run) for run in deal(total, parts, unit)] == lengths


@pytest.mark.parametrize(("total", "parts", "unit"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_deal_refuses_nonsense(total: int, parts: int, unit: int) -> None:
    with pytest.raises(ValueError, match="cannot deal"):
        deal(total, parts, unit)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 2000), st.integers(1, 500), DEGREES)
def test_a_rank_has_the_kv_heads_that_its_q_heads_read(
    kv_heads: int, q_per_kv: int, features: int, vocab: int, tp: int
) -> None:
    model = config(kv_heads * q_per_kv, kv_heads, features, vocab)
    plans = [ShardPlan.make(model, tp, rank) for rank in range(tp)]
    for plan in plans:
        read = sorted({head // q_per_kv for head in plan.q_heads})
        assert list(plan.kv_heads) == read
    for name, total in (
        ("q_heads", model.num_heads),
        ("intermediate", features),
        ("vocab", vocab),
    ):
        owned = [one for plan in plans for one in getattr(plan, name)]
        assert owned == list(range(total))
    assert plans[0].q_heads
    assert plans[0].intermediate
    assert plans[0].vocab


def test_nine_heads_over_two_ranks() -> None:
    first, second = (ShardPlan.make(config(9, 3, 1536, 49152), 2, rank) for rank in (0, 1))
    assert (first.q_heads, first.kv_heads) == (range(5), range(2))
    assert (second.q_heads, second.kv_heads) == (range(5, 9), range(1, 3))


@pytest.mark.parametrize(("features", "unit"), [(1536, 32), (48, 16), (72, 8), (100, 8)])
def test_features_go_in_the_largest_unit_that_divides(features: int, unit: int) -> None:
    plans = [ShardPlan.make(config(8, 8, features, 64), 3, rank) for rank in range(3)]
    assert all(plan.intermediate.start % unit == 0 for plan in plans)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="not in a group of 2"):
        ShardPlan.make(config(2, 2, 64, 64), 2, rank)
