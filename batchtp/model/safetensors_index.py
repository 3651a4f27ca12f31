"""Which safetensors files a directory has, and every tensor's shape, dtype and place. No torch.

Headers only: opening a file checks that its size is what its header promises.
"""

from __future__ import annotations

import json
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
    """Where a tensor is, and what the file says it is. `dtype`: safetensors' name (F16, I32, …).
    `start`: its first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


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
        # The library checks the header and the file's size; places in the file it keeps to itself.
        with safe_open(file, framework="np"):
            header, data = _header(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is cut short or corrupt ({error}). Download it again."
        ) from error
    return {
        name: TensorInfo(
            file,
            tuple(stored["shape"]),
            stored["dtype"],
            data + stored["data_offsets"][0],
            stored["data_offsets"][1] - stored["data_offsets"][0],
        )
        for name, stored in header.items()
        if name != "__metadata__"
    }


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """A valid file's header, and where its data starts."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(size)), 8 + size
