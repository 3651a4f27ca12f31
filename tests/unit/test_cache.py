"""How many KV blocks a rank says it can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_driver import DATA, group_config

from batchtp.errors import SettingsError, UnsupportedModelError
from batchtp.model.decoder import check_length
from batchtp.worker import cache

MODEL = DATA / "awq-g32-zero-range"
GIB = 2**30


def shard_of(kv_heads: int) -> Any:
    """What sizing reads of a decoder: 10 layers, head_dim 64, float32, on a CPU."""
    return SimpleNamespace(
        shard=SimpleNamespace(kv_heads=range(kv_heads)),
        config=SimpleNamespace(num_layers=10, head_dim=64),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def budget(free: int, monkeypatch: pytest.MonkeyPatch, *, heads: int = 4, **changes: Any) -> int:
    monkeypatch.setattr(cache, "free_host_bytes", lambda: free)
    config = group_config(MODEL, **({"tp": 2, "max_sequences": 8} | changes))
    return cache.block_budget(shard_of(heads), config, 0, 4096)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert cache.block_bytes(shard_of(4), 16) == 2 * 10 * 16 * 4 * 64 * 4
    assert cache.block_bytes(shard_of(0), 16) == 0


def test_a_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget(0, monkeypatch, kv_blocks=7) == 7


def test_plenty_of_memory_gives_what_the_sequences_need(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight sequences of 2048 tokens, not of the context's 4096.
    assert budget(100 * GIB, monkeypatch) == 8 * 2048 // 16


def test_a_quarter_of_memory_is_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = cache.block_bytes(shard_of(4), 16)
    assert budget(GIB, monkeypatch) == GIB // 4 // 2 // per_block


def test_a_rank_without_heads_does_not_limit_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget(0, monkeypatch, heads=0) == 8 * 4096 // 16


def test_no_room_for_one_block_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="No memory is left for the KV cache"):
        budget(1000, monkeypatch)


def test_this_machine_has_some_memory_and_a_core() -> None:
    assert cache.free_host_bytes() > 0
    assert cache.usable_cores() >= 1


def test_a_context_past_the_model_is_refused() -> None:
    config = SimpleNamespace(
        max_position_embeddings=512, rope=SimpleNamespace(kind="default", factor=1.0)
    )
    check_length(config, 512)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="513 is past the 512 positions"):
        check_length(config, 513)  # type: ignore[arg-type]
    config.rope = SimpleNamespace(kind="dynamic", factor=2.0)
    check_length(config, 1024)  # type: ignore[arg-type]
