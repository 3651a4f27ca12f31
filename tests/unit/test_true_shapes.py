"""The reported models' MLPs at their true widths, 231 groups of 128 and all, over TP 2, 4 and 8.

InternLM/lmdeploy#1755 and sgl-project/sglang#2829. The hidden size is a sixteenth of the true one;
benchmarks/true_shapes.py does the same with all of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_driver import part

from batchtp.model.config import load_config
from batchtp.model.sharding import ShardPlan
from batchtp.testing.random_awq import TRUE_SHAPES, Shape, write_random_awq
from batchtp.testing.thread_group import ThreadedRunners

PROMPT = [3, 141, 59, 26, 535, 89, 79, 323, 84]


def reduced(shape: Shape) -> Shape:
    return replace(shape, hidden=512, heads=64, kv_heads=8, head_dim=8)


@pytest.fixture(scope="module", params=TRUE_SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_random_awq(folder, reduced(TRUE_SHAPES[request.param]))
    return folder


def logits(model: Path, tp: int) -> torch.Tensor:
    group = ThreadedRunners(model, tp)
    slices = (part(0, PROMPT, 0, [1]), part(1, PROMPT[:4], 0, [0]))
    return group.logits(slices, everywhere=True)


def test_every_degree_is_tp_1_within_rounding(model: Path) -> None:
    one = logits(model, 1)
    size = one.square().mean().sqrt()
    assert one.isfinite().all()
    assert size > 0.3
    for tp in (2, 4, 8):
        off = (logits(model, tp) - one).abs().max() / size
        assert off < 1e-5, f"tp {tp}: {off}"


@pytest.mark.parametrize(("tp", "groups"), [(2, [115.5] * 2), (4, [57.75] * 4)])
def test_a_group_may_be_split_between_ranks(tmp_path: Path, tp: int, groups: list[float]) -> None:
    write_random_awq(tmp_path, reduced(TRUE_SHAPES["qwen2-72b"]))
    config = load_config(tmp_path)
    runs = [ShardPlan.make(config, tp, rank).intermediate for rank in range(tp)]
    assert [len(run) / 128 for run in runs] == groups
