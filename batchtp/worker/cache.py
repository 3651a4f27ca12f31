"""The KV cache of a rank: how many blocks it can hold, and their tensors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from batchtp.errors import SettingsError
from batchtp.model.decoder import Decoder
from batchtp.model.layers import LayerCache
from batchtp.worker.comm import ranks_on_device
from batchtp.worker.messages import GroupConfig, Slice
from batchtp.worker.runner import step_input

# A host's memory is also the services' and the page cache's; weights are loaded already.
_HOST_SHARE = 0.25
# Most prompts and outputs of a batch are far shorter than the model's context.
_HOST_TOKENS_PER_SEQUENCE = 2048
# A CUDA context and its libraries, which torch does not count, when other ranks hide it.
_CONTEXT_BYTES = 700 * 2**20


def make_cache(decoder: Decoder, blocks: int, block_size: int) -> list[LayerCache]:
    """One entry a layer; its memory is not initialised."""
    shape = (blocks, block_size, len(decoder.shard.kv_heads), decoder.config.head_dim)
    return [
        LayerCache(*(torch.empty(shape, dtype=decoder.dtype, device=decoder.device) for _ in "kv"))
        for _ in range(decoder.config.num_layers)
    ]


def block_budget(decoder: Decoder, config: GroupConfig, rank: int, max_model_len: int) -> int:
    """How many blocks this rank can hold, at least 1: what the settings say, else what fits.

    Raises SettingsError when not even one block fits.
    """
    if config.kv_blocks:
        return config.kv_blocks
    most = config.max_sequences * -(-max_model_len // config.block_size)
    per_block = block_bytes(decoder, config.block_size)
    if not per_block:
        return most
    if decoder.device.type == "cuda":
        blocks = _device_bytes(decoder, config, rank, max_model_len) // per_block
    else:
        tokens = min(max_model_len, _HOST_TOKENS_PER_SEQUENCE)
        most = config.max_sequences * -(-tokens // config.block_size)
        blocks = int(free_host_bytes() * _HOST_SHARE / config.tp) // per_block
    if blocks < 1:
        raise SettingsError(
            f"No memory is left for the KV cache: one block takes {per_block:,} bytes. Lower "
            "max_batched_tokens or max_sequences, raise memory_fraction, or use a higher tp."
        )
    return min(blocks, most)


def block_bytes(decoder: Decoder, block_size: int) -> int:
    """Bytes of one block over all layers on this rank (0 when it has no heads)."""
    row = len(decoder.shard.kv_heads) * decoder.config.head_dim * decoder.dtype.itemsize
    return 2 * decoder.config.num_layers * block_size * row


def free_host_bytes() -> int:
    """Memory that may still be taken: the kernel's estimate, or less under a cgroup limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_path, usage_path in _CGROUP_FILES:
        limit, usage = _read_number(limit_path), _read_number(usage_path)
        if limit is not None and usage is not None:
            free = min(free, max(limit - usage, 0))
    return free


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _read_number(path: str) -> int | None:
    """The number in a cgroup file; None when there is no such file, or no limit (`max`)."""
    if not os.path.exists(path):
        return None
    text = Path(path).read_text().strip()
    return int(text) if text.isdigit() else None


def usable_cores() -> int:
    """Cores this process may use: its affinity, or less under a cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    path = Path("/sys/fs/cgroup/cpu.max")
    if path.exists():
        quota, period = path.read_text().split()
        if quota.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _device_bytes(decoder: Decoder, config: GroupConfig, rank: int, max_model_len: int) -> int:
    """The rank's share of the card's memory, less weights, less the peak of a full step."""
    torch.cuda.synchronize(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    _profile(decoder, config, max_model_len)
    torch.cuda.synchronize(decoder.device)
    peak = torch.cuda.max_memory_allocated(decoder.device)
    reserved = torch.cuda.memory_reserved(decoder.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    sharers = ranks_on_device("cuda", rank, config.tp)
    if sharers == 1:
        others = total - free - torch.cuda.memory_reserved(decoder.device)
    else:
        others = _CONTEXT_BYTES
    # Fragmentation: the allocator keeps more than it hands out.
    slack = max(reserved - peak, 0) // 2
    return int(total * config.memory_fraction / sharers) - others - peak - slack


def _profile(decoder: Decoder, config: GroupConfig, max_model_len: int) -> None:
    """A step of the greatest size, whose keys and values all go to the same few blocks."""
    length = min(config.max_batched_tokens, max_model_len)
    blocks = tuple(range(-(-length // config.block_size)))
    slices = []
    left = config.max_batched_tokens
    while left > 0:
        count = min(left, length)
        slices.append(
            Slice(
                sequence_id=0,
                token_ids=(0,) * count,
                start=0,
                blocks=blocks,
                sample=True,
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                seed=0,
            )
        )
        left -= count
    step = step_input(slices, config.block_size, decoder.device)
    rows = torch.arange(min(config.max_sequences, config.max_batched_tokens))
    step = replace(step, sample_rows=rows.to(decoder.device))
    with torch.inference_mode():
        decoder.forward(step, make_cache(decoder, len(blocks), config.block_size))
