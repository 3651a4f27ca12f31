"""What a rank does between its Hello and its first step. Importing this imports torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from batchtp.kernels import ops
from batchtp.kernels.flat import Stored
from batchtp.model.config import ModelConfig, load_config
from batchtp.model.decoder import Decoder, check_length
from batchtp.model.layers import LinearWeight
from batchtp.model.loader import Progress, load_shard
from batchtp.model.sharding import ShardPlan
from batchtp.model.weight_cache import CacheKey, WeightCache, checkpoint_digest
from batchtp.worker.cache import block_budget, make_cache, usable_cores
from batchtp.worker.comm import Group, join, rank_device
from batchtp.worker.messages import GroupConfig, Hello
from batchtp.worker.runner import Runner

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A rank's share of the model, on its device. `weight_bytes` as in the checkpoint's form."""

    decoder: Decoder
    max_model_len: int
    weight_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int
    kv_blocks: int


def join_group(hello: Hello) -> tuple[Group, torch.device]:
    """Take this rank's device and meet the other ranks."""
    config = hello.config
    device = rank_device(config.device, hello.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, usable_cores() // config.tp))
    group = join(
        hello.rank, config.tp, device, hello.rendezvous, timeout_secs=config.step_timeout_secs
    )
    return group, device


def load(
    hello: Hello, group: Group, device: torch.device, progress: Progress = lambda done: None
) -> LoadedShard:
    """Read the rank's share of the checkpoint and size its cache.

    Raises ModelError for a checkpoint that cannot be served.
    """
    settings, path = hello.config, Path(hello.config.model_path)
    config = load_config(path)
    max_model_len = settings.max_model_len or config.max_position_embeddings
    check_length(config, max_model_len)
    shards = [ShardPlan.make(config, settings.tp, rank) for rank in range(settings.tp)]
    watermark = Watermark(device)
    tensors = _weights(hello, config, shards[hello.rank], device, progress)
    weight_bytes = sum(_nbytes(weight) for weight in tensors.values())
    with torch.inference_mode():
        decoder = Decoder(config, shards, hello.rank, tensors, group, max_model_len=max_model_len)
    host_peak, device_peak = watermark.read()
    # Sizing the cache runs a step, which needs every rank; some load slower than others.
    group.wait_for_all("loaded")
    blocks = block_budget(decoder, settings, hello.rank, max_model_len)
    return LoadedShard(decoder, max_model_len, weight_bytes, host_peak, device_peak, blocks)


def _weights(
    hello: Hello, config: ModelConfig, plan: ShardPlan, device: torch.device, progress: Progress
) -> dict[str, LinearWeight]:
    """From the weight cache where it has them, else from the checkpoint and then into the cache."""
    settings, path = hello.config, Path(hello.config.model_path)
    dtype = _DTYPES[settings.dtype]
    if not settings.weight_cache:
        return load_shard(
            path, config, plan, dtype, device, quantize=settings.quantize, progress=progress
        )
    cache = WeightCache(Path(settings.weight_cache), settings.weight_cache_bytes)
    key = CacheKey(
        checkpoint=checkpoint_digest(path),
        layout="kernel" if ops.uses_triton(torch.empty(0, device=device)) else "plain",
        dtype=settings.dtype,
        quantize=settings.quantize,
        tp=settings.tp,
        rank=hello.rank,
    )
    cached = cache.load(key, device)
    if cached is not None:
        return cached
    weights = load_shard(
        path, config, plan, dtype, device, quantize=settings.quantize, progress=progress
    )
    cache.store(key, weights)
    return weights


class Watermark:
    """How high this process's memory rises from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Resets the kernel's high-water mark; without the right to, the mark is the process's own.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._host_before = _resident("VmRSS")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> tuple[int, int]:
        """Bytes that the host's memory rose by at most, and the most held on the device."""
        cuda = self._device.type == "cuda"
        device = torch.cuda.max_memory_allocated(self._device) if cuda else 0
        return _resident("VmHWM") - self._host_before, device


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def make_runner(loaded: LoadedShard, config: GroupConfig, kv_blocks: int) -> Runner:
    """Allocate the cache."""
    with torch.inference_mode():
        cache = make_cache(loaded.decoder, kv_blocks, config.block_size)
    return Runner(loaded.decoder, cache, config.block_size)


def _nbytes(weight: LinearWeight) -> int:
    parts: tuple[Stored, ...] = weight if isinstance(weight, tuple) else (weight,)
    return sum(part.nbytes for part in parts)
