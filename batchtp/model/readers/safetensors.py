"""Reads ranges of tensors from safetensors files, checked against what is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.model.ranged import RangedFile, Span
from batchtp.model.safetensors_index import TensorInfo, index_tensors

FLOATS = ("F16", "BF16", "F32")
_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}


class TensorFiles:
    """The tensors of a directory. Its files stay open until `close`.

    Every read names the shape that the config implies and raises CheckpointError, with the tensor
    and its file, when the file holds another.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.tensors: Mapping[str, TensorInfo] = index_tensors(directory)
        self._device = device
        # The device copies from pinned memory while the next tensor is read.
        self._pin = device.type == "cuda"
        self._open: dict[Path, RangedFile] = {}

    def close(self) -> None:
        """Let the files go."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    @property
    def bytes_read(self) -> int:
        """What was read of the open files, headers apart."""
        return sum(file.bytes_read for file in self._open.values())

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
        taken = [*ranges, *(range(size) for size in shape[len(ranges) :])]
        try:
            read = self._run(info, taken)
        except CheckpointError as error:
            raise CheckpointError(f"Tensor {name}: {error}") from error
        return read.to(self._device, non_blocking=True)

    def _run(self, info: TensorInfo, taken: Sequence[range]) -> Tensor:
        """A run of a vector or matrix, in host memory."""
        dtype = _DTYPES[info.dtype]
        read = torch.empty([len(run) for run in taken], dtype=dtype, pin_memory=self._pin)
        if read.numel():
            rows, columns = (range(1), *taken)[-2:]
            stride = info.shape[-1] * dtype.itemsize
            span = Span(
                start=info.start + rows.start * stride,
                rows=len(rows),
                stride=stride,
                skip=columns.start * dtype.itemsize,
                width=len(columns) * dtype.itemsize,
            )
            self._file(info.file).read(span, read.view(-1).view(torch.uint8).numpy().data)
        return read

    def _file(self, path: Path) -> RangedFile:
        if path not in self._open:
            self._open[path] = RangedFile(path)
        return self._open[path]
