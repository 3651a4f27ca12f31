"""Runs of stored tensors: the right bytes, and no others."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from model_files import write_hf
from safetensors.torch import save_file

from batchtp.errors import CheckpointError
from batchtp.model.config import load_config
from batchtp.model.loader import load_shard, open_source
from batchtp.model.ranged import RangedFile, Span
from batchtp.model.readers.packed import LinearRun
from batchtp.model.readers.safetensors import TensorFiles
from batchtp.model.sharding import ShardPlan

CPU = torch.device("cpu")
SHAPE = (10, 12)


@pytest.fixture
def files(tmp_path: Path) -> TensorFiles:
    save_file({"w": torch.arange(120.0).view(SHAPE)}, tmp_path / "model.safetensors")
    return TensorFiles(tmp_path, CPU)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (range(10), range(12)),
        (range(3, 7), range(12)),
        (range(10), range(4, 9)),
        (range(2, 5), range(11, 12)),
        (range(4, 5), range(0, 1)),
        (range(4, 4), range(12)),
        (range(10), range(5, 5)),
    ],
)
def test_a_run_is_read_and_nothing_else(files: TensorFiles, rows: range, columns: range) -> None:
    with closing(files):
        got = files.floats("w", SHAPE, rows, columns)
        assert torch.equal(
            got,
            torch.arange(120.0).view(SHAPE)[rows.start : rows.stop][
                :, columns.start : columns.stop
            ],
        )
        assert files.bytes_read == 4 * len(rows) * len(columns)


@pytest.mark.parametrize("tp", range(1, 9))
def test_ranks_together_read_each_byte_of_a_partitioned_tensor_once(
    tmp_path: Path, tp: int
) -> None:
    write_hf(tmp_path, "compressed-tensors")
    config = load_config(tmp_path)
    read = 0
    for rank in range(tp):
        run = ShardPlan.make(config, tp, rank).intermediate
        with closing(open_source(tmp_path, config, torch.float32, CPU)) as source:
            if run:
                source.linear(LinearRun("model.layers.0.mlp.down_proj", 72, 64, run, range(64)))
            read += source.bytes_read
    words, shape, groups, zeros = 64 * 9 * 4, 2 * 8, 64 * 2, 8 * 4
    # Groups of 32 rows: a rank reads the scale and zero of each group that it has a row of.
    touched = 0
    for rank in range(tp):
        run = ShardPlan.make(config, tp, rank).intermediate
        touched += len({row // 32 for row in run})
    owners = sum(bool(ShardPlan.make(config, tp, rank).intermediate) for rank in range(tp))
    assert read == words + owners * shape + touched * (groups + zeros)


def test_a_file_that_shrank_is_an_error_with_the_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.arange(120.0).view(SHAPE)}, tmp_path / "model.safetensors")
    with closing(TensorFiles(tmp_path, CPU)) as files:
        path = tmp_path / "model.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises(CheckpointError, match=r"Tensor w: .*cut short"):
            files.floats("w", SHAPE)


def test_a_device_that_fails_is_an_error_with_the_file(tmp_path: Path) -> None:
    # A directory opens, and every read of it fails.
    with (
        closing(RangedFile(tmp_path)) as file,
        pytest.raises(CheckpointError, match=f"Cannot read {tmp_path}"),
    ):
        file.read(Span(0, 1, 4, 0, 4), memoryview(bytearray(4)))


def test_files_are_closed_after_a_load(tmp_path: Path) -> None:
    write_hf(tmp_path, "awq")
    config = load_config(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    load_shard(tmp_path, config, ShardPlan.make(config, 1, 0), torch.float32, CPU)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
