"""Shards on disk: the same weights again, or a plain word that they are not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_hf
from rank_driver import DATA

from batchtp.errors import CheckpointError
from batchtp.kernels.checksum import checksums
from batchtp.kernels.flat import flatten
from batchtp.kernels.packed import PackedInt4, pack
from batchtp.kernels.weights import Int4Weight
from batchtp.model.config import load_config
from batchtp.model.loader import load_shard
from batchtp.model.shard_file import pieces, read_shard, write_shard
from batchtp.model.sharding import ShardPlan
from batchtp.model.weight_cache import CacheKey, WeightCache, checkpoint_digest

CPU = torch.device("cpu")
KEY = CacheKey("abc", "plain", "float32", "none", tp=2, rank=1)
ACT_ORDER = DATA / "ct-gptq-actgroup-g64"


def shard(path: Path, rank: int = 0, tp: int = 1) -> dict[str, Any]:
    config = load_config(path)
    return load_shard(path, config, ShardPlan.make(config, tp, rank), torch.float32, CPU)


def assert_same(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, weight in wanted.items():
        theirs = got[name]
        assert type(theirs) is type(weight), name
        ones = theirs if isinstance(theirs, tuple) else (theirs,)
        others = weight if isinstance(weight, tuple) else (weight,)
        for one, other in zip(ones, others, strict=True):
            a, b = flatten(one), flatten(other)
            assert (a.kind, a.values) == (b.kind, b.values), name
            assert a.tensors.keys() == b.tensors.keys()
            assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors), name


@pytest.mark.parametrize("name", ["awq-g64", "ct-gptq-actgroup-g64", "gptq-lmhead-8bit"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (3, 2)])
def test_a_stored_shard_is_the_loaded_one(tmp_path: Path, name: str, tp: int, rank: int) -> None:
    weights = shard(DATA / name, rank, tp)
    size = write_shard(tmp_path / "s", weights)
    assert size == (tmp_path / "s").stat().st_size
    got = read_shard(tmp_path / "s", CPU)
    assert_same(got, weights)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in pieces(got) if tensor.numel())


def test_the_kernels_layout_and_parts_of_other_formats_are_stored_too(tmp_path: Path) -> None:
    weights: dict[str, Any] = shard(ACT_ORDER)
    down = weights["layers.0.down"]
    assert isinstance(down, Int4Weight)
    weights["packed"] = pack(down)
    weights["mixed"] = (torch.randn(3, 5), pack(down), down)
    write_shard(tmp_path / "s", weights)
    got = read_shard(tmp_path / "s", CPU)
    assert isinstance(got["packed"], PackedInt4)
    assert_same(got, weights)


@pytest.mark.parametrize("place", ["data", "header", "end", "magic"])
def test_a_damaged_file_is_noticed(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s"
    size = write_shard(path, shard(DATA / "awq-g32-zero-range"))
    data = bytearray(path.read_bytes())
    if place == "data":
        data[size * 3 // 4] ^= 1
    elif place == "header":
        data[24] ^= 255
    elif place == "magic":
        data[0] ^= 1
    else:
        del data[-1]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=str(path)):
        read_shard(path, CPU)


def test_a_checksum_depends_on_every_byte_and_its_place() -> None:
    base = torch.randint(0, 256, (8 * (1 << 20) + 8 * 77 + 5,), dtype=torch.uint8)
    (known,) = checksums([base])
    for at in (0, 8, 8 * (1 << 20) - 1, 8 * (1 << 20), len(base) - 1):
        other = base.clone()
        other[at] ^= 64
        assert checksums([other]) != [known]
    assert checksums([torch.cat((base[8:16], base[:8], base[16:]))]) != [known]
    assert checksums([torch.cat((base, torch.zeros(1, dtype=torch.uint8)))]) != [known]
    assert checksums([base.clone()]) == [known]
    assert checksums([]) == []


def test_load_gives_what_was_stored_and_nothing_of_another_key(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 30)
    weights = shard(DATA / "awq-g32-zero-range")
    assert cache.load(KEY, CPU) is None
    assert cache.store(KEY, weights)
    got = cache.load(KEY, CPU)
    assert got is not None
    assert_same(got, weights)
    for change in (
        {"checkpoint": "abd"},
        {"layout": "kernel"},
        {"dtype": "float16"},
        {"quantize": "int4"},
        {"tp": 3},
        {"rank": 0},
    ):
        assert cache.load(replace(KEY, **change), CPU) is None


def test_a_corrupt_entry_is_removed_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightCache(tmp_path, 1 << 30)
    cache.store(KEY, shard(DATA / "awq-g32-zero-range"))
    (path,) = tmp_path.glob("*/*.shard")
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.load(KEY, CPU) is None
    assert not path.exists()
    assert "the weight cache is not used" in caplog.text


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    weights = shard(DATA / "awq-g32-zero-range")
    size = write_shard(tmp_path / "probe", weights)
    cache = WeightCache(tmp_path / "cache", 3 * size)
    keys = [replace(KEY, checkpoint=name) for name in ("first", "second", "third", "fourth")]
    for age, key in enumerate(keys[:3]):
        assert cache.store(key, weights)
        path = tmp_path / "cache" / key.folder / key.file
        os.utime(path, (1000 + age, 1000 + age))
    # Used just now.
    assert cache.load(keys[0], CPU) is not None
    assert cache.store(keys[3], weights)
    there = [cache.load(key, CPU) is not None for key in keys]
    assert there == [True, False, True, True]


def test_a_shard_that_does_not_fit_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightCache(tmp_path, 1000)
    assert not cache.store(KEY, shard(DATA / "awq-g32-zero-range"))
    assert not list(tmp_path.glob("*/*"))
    assert "no room" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = WeightCache(tmp_path / "file", 1 << 30)
    assert not cache.store(KEY, {"norm": torch.ones(3)})
    assert "could not be written" in caplog.text


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 30)
    folder = tmp_path / KEY.folder
    folder.mkdir()
    # No process has a number past the kernel's limit.
    left = folder / f"{KEY.file}.{1 << 30}"
    left.write_bytes(b"half")
    mine = folder / f"{KEY.file}.{os.getpid()}"
    mine.write_bytes(b"in work")
    cache.store(replace(KEY, rank=0), {"norm": torch.ones(3)})
    assert not left.exists()


def test_the_digest_changes_with_the_checkpoint(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_hf(model, "awq")
    known = checkpoint_digest(model)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copy2)
    assert checkpoint_digest(copy) == known
    weights = copy / "model.safetensors"
    facts = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = checkpoint_digest(copy)
    assert changed != known
    # Even a change that no sample saw: its time tells.
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert checkpoint_digest(copy) not in (known, changed)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert checkpoint_digest(model) != known
