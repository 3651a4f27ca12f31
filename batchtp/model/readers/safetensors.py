"""Reads ranges of tensors from safetensors files, checked against what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.model.safetensors_index import TensorInfo, index_tensors

FLOATS = ("F16", "BF16", "F32")


class TensorFiles:
    """The tensors of a directory. Its files stay open until `close`.

    Every read names the shape that the config implies and raises CheckpointError, with the tensor
    and its file, when the file holds another.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.tensors: Mapping[str, TensorInfo] = index_tensors(directory)
        self._device = device
        self._open: dict[Path, Any] = {}

    def close(self) -> None:
        """Let the files go."""
        # safetensors unmaps a file when its handle goes.
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def floats(self, name: str, shape: tuple[int, ...], *ranges: range) -> Tensor:
        """A run of a floating-point tensor, in the file's dtype. `ranges`: one a leading dimension;
        all of the others.
        """
        return self._read(name, shape, FLOATS, ranges)

    def integers(self, name: str, shape: tuple[int, ...], *ranges: range) -> Tensor:
        """A run of an int32 tensor."""
        return self._read(name, shape, ("I32",), ranges)

    def sizes(self, name: str) -> Tensor:
        """A tensor of two sizes, int32 or int64."""
        return self._read(name, (2,), ("I32", "I64"), ())

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.directory} has no tensor {name}.")
        return info

    def _read(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], ranges: tuple[range, ...]
    ) -> Tensor:
        info = self._info(name)
        if info.shape != shape:
            raise CheckpointError(
                f"Tensor {name} in {info.file} has shape {list(info.shape)}; the config implies "
                f"{list(shape)}."
            )
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"Tensor {name} in {info.file} is {info.dtype}; expected {' or '.join(dtypes)}."
            )
        try:
            stored = self._handle(info.file).get_slice(name)
            taken = tuple(slice(run.start, run.stop) for run in ranges)
            read: Tensor = stored[taken] if taken else stored[:]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"Cannot read tensor {name} of {info.file}: {error}") from error
        return read.to(self._device)

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]
