"""What the loader asks of a checkpoint, whatever its format; names are Hugging Face's."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

from batchtp.kernels.weights import Int4Weight
from batchtp.model.readers.packed import LinearRun

Weight: TypeAlias = Tensor | Int4Weight


class WeightSource(Protocol):
    """An open checkpoint that gives runs of tensors, reading no more than the run.

    Every method raises CheckpointError when a tensor is missing or not as expected.
    """

    def has(self, tensor: str) -> bool:
        """Whether there is such a tensor."""

    def vector(self, tensor: str, size: int, run: range) -> Tensor:
        """A run of a norm or bias of `size` elements, in the load's dtype."""

    def rows(self, tensor: str, shape: tuple[int, int], run: range) -> Tensor:
        """Rows of an embedding, in the load's dtype: [run, shape[1]]."""

    def linear(self, run: LinearRun) -> Weight:
        """A run of a linear: an Int4Weight, or dense [columns, rows] in the load's dtype."""

    @property
    def bytes_read(self) -> int:
        """Bytes read of tensors so far."""

    def close(self) -> None:
        """Let the files go."""
