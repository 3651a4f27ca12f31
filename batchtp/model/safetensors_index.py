"""Which safetensors files a directory has, and every tensor's shape and dtype. No torch.

Headers only: opening a file checks that its size is what its header promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from batchtp.errors import CheckpointError
from batchtp.model.config_hf import read_json

# Mistral ships its weights a second time, under its own names.
_SECOND_COPY = "consolidated"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is, and what the file says it is. `dtype`: safetensors' name (F16, I32, …)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def index_tensors(directory: Path) -> Mapping[str, TensorInfo]:
    """Every tensor of the directory's safetensors files, by name.

    Raises CheckpointError when there are none, one is missing, cut short or corrupt, or lacks a
    tensor that the index promises.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    files = sorted(directory.glob("*.safetensors"))
    files = [f for f in files if not f.name.startswith(_SECOND_COPY)] or files
    if not files:
        raise CheckpointError(f"{directory} has no .safetensors file; other weights are not read.")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _tensors_of(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"Tensor {name} is in both {tensors[name].file} and {file}. "
                    "Keep one set of weights in the directory."
                )
            tensors[name] = info
    return tensors


def _indexed(index: Path) -> Mapping[str, TensorInfo]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors to file names.")
    files = {name: index.parent / name for name in sorted(set(places.values()))}
    for file in files.values():
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {index.name} names it. Download it again.")
    stored = {name: _tensors_of(file) for name, file in files.items()}
    for tensor, name in places.items():
        if tensor not in stored[name]:
            raise CheckpointError(
                f"{files[name]} has no tensor {tensor}, which {index.name} says it has."
            )
    return {tensor: stored[name][tensor] for tensor, name in places.items()}


def _tensors_of(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="np") as opened:
            return {name: _info(file, opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is cut short or corrupt ({error}). Download it again."
        ) from error


def _info(file: Path, stored: Any) -> TensorInfo:
    shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
    elements = 1
    for size in shape:
        elements *= size
    return TensorInfo(file, shape, dtype, elements * _DTYPE_BYTES.get(dtype, 1))
