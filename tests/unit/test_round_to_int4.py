"""Dense checkpoints rounded to int4 at load: near the original, and the same at every degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_hf
from rank_driver import DATA

from batchtp.errors import CheckpointError, UnsupportedModelError
from batchtp.kernels.round_to_int4 import GROUP_ROWS, round_to_int4
from batchtp.kernels.weights import Int4Weight, dequantize
from batchtp.model.config import load_config
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan

CPU = torch.device("cpu")


@pytest.mark.parametrize(("n", "k"), [(5, 64), (3, 200), (4, 7)])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_every_weight_is_within_half_a_step(n: int, k: int, shift: float) -> None:
    weight = torch.randn(n, k) + shift
    got = round_to_int4(weight)
    back = dequantize(got).t()
    assert back.shape == weight.shape
    steps = got.scales.float().t().repeat_interleave(GROUP_ROWS, 1)[:, :k]
    # The zero point is rounded too, and the scale to float16.
    assert ((back - weight).abs() <= steps * 1.01).all()
    inner = (weight - back).abs() / steps
    assert inner.mean() < 0.3


def test_a_group_of_zeros_or_of_one_value_comes_back() -> None:
    weight = torch.zeros(2, 3 * GROUP_ROWS)
    weight[0, GROUP_ROWS : 2 * GROUP_ROWS] = 0.5
    assert torch.allclose(dequantize(round_to_int4(weight)).t(), weight, atol=1e-3)


@pytest.mark.parametrize("tp", [2, 3, 5, 8])
def test_the_rounded_model_does_not_depend_on_the_degree(tmp_path: Path, tp: int) -> None:
    write_hf(tmp_path, "")
    config = load_config(tmp_path)
    one = _rounded(tmp_path, 1, 0)
    run_at = 0
    for rank in range(tp):
        part = _rounded(tmp_path, tp, rank)
        run = ShardPlan.make(config, tp, rank).intermediate
        if not run:
            continue
        assert run.start == run_at
        run_at = run.stop
        down, whole = part["layers.0.down"], one["layers.0.down"]
        assert isinstance(down, Int4Weight)
        assert down.first_group_offset == run.start % GROUP_ROWS
        assert torch.equal(dequantize(down), dequantize(whole)[run.start : run.stop])
        assert "lm_head" not in part or isinstance(part["lm_head"], torch.Tensor)
    assert run_at == config.intermediate_size


def _rounded(path: Path, tp: int, rank: int) -> dict[str, Any]:
    config = load_config(path)
    plan = ShardPlan.make(config, tp, rank)
    return load_shard(path, config, plan, torch.float32, CPU, quantize="int4")


def test_what_is_quantised_already_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="quantised already"):
        _rounded(DATA / "awq-g64", 1, 0)


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_hf(tmp_path, "")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds a NaN"):
        _rounded(tmp_path, 1, 0)
