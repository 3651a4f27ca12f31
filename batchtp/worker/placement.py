"""What is served, and where: the model on disk, its tokenizer, the device and the dtype.

Decided here and not in a rank, so that every rank and every generation gets the same answer. No
torch: devices are read from the system.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from batchtp.model.config import ModelConfig, load_config
from batchtp.model.resolve import resolve_model
from batchtp.settings import Settings
from batchtp.worker.messages import GroupConfig
from batchtp.worker.tokenizer import Tokenizer

# A step on a GPU may compile kernels first. On a busy CPU a full prefill takes minutes.
_STEP_SECS = {"cuda": 120.0, "cpu": 600.0}
# With these a CPU multiplies bfloat16 in hardware; without, float32 is faster.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
# The backend gives up this much after the supervisor, whose deadline names the culprit.
_BACKSTOP_SECS = 30.0


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """A model that can be served. `device` and `dtype` are resolved: never auto."""

    served_name: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    device: str
    dtype: str

    @staticmethod
    def open(settings: Settings) -> ModelOnDisk:
        """Find the model, read its config and tokenizer. Raises ModelError."""
        resolved = resolve_model(settings.model, settings.home_path)
        config = load_config(resolved.path)
        device = find_device(settings.device)
        return ModelOnDisk(
            served_name=settings.served_name or resolved.name,
            path=resolved.path,
            config=config,
            tokenizer=Tokenizer.from_path(resolved.path),
            device=device,
            dtype=find_dtype(settings.dtype, device, config),
        )


def find_device(wanted: str) -> str:
    """`cuda` when there is an NVIDIA GPU that this process may see, unless told otherwise."""
    if wanted != "auto":
        return wanted
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def find_dtype(wanted: str, device: str, config: ModelConfig) -> str:
    """On a GPU the checkpoint's 16-bit dtype; on a CPU what its instructions do fast."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "bfloat16" if config.torch_dtype == "bfloat16" else "float16"
    return "bfloat16" if _BF16_FLAGS & _cpu_flags() else "float32"


def group_config(settings: Settings, model: ModelOnDisk) -> GroupConfig:
    """What every rank is told. Memory is set aside for steps of `max_batched_tokens`."""
    context = settings.max_model_len or model.config.max_position_embeddings
    cache = settings.weight_cache_path
    unsplit = 0 if settings.chunked_prefill else context
    return GroupConfig(
        model_path=str(model.path),
        tp=settings.tp,
        device=model.device,
        dtype=model.dtype,
        max_model_len=settings.max_model_len,
        max_sequences=settings.max_sequences,
        max_batched_tokens=max(settings.max_batched_tokens, unsplit),
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        memory_fraction=settings.memory_fraction,
        step_timeout_secs=step_deadline_secs(settings, model.device) + _BACKSTOP_SECS,
        quantize=settings.quantize,
        weight_cache=str(cache or ""),
        weight_cache_bytes=int(settings.weight_cache_gib * 2**30),
    )


def step_deadline_secs(settings: Settings, device: str) -> float:
    """How long a step may take before it is a fault."""
    return settings.step_timeout_secs or _STEP_SECS[device]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
