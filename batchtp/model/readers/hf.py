"""A Hugging Face directory as a WeightSource: plain, AWQ, GPTQ or compressed-tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from batchtp.model.config_records import ModelConfig
from batchtp.model.names import check_names
from batchtp.model.quantization import AWQ, GPTQ, QuantConfig
from batchtp.model.readers.awq import AwqReader
from batchtp.model.readers.compressed_tensors import CompressedTensorsReader
from batchtp.model.readers.gptq import GptqReader
from batchtp.model.readers.packed import LinearRun, PackedReader, finish
from batchtp.model.readers.safetensors import TensorFiles
from batchtp.model.readers.source import Weight


class HfSource:
    """See WeightSource. A module is quantised when the file stores it so."""

    def __init__(
        self, directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises CheckpointError for files that are missing, corrupt or hold unknown tensors."""
        self._files = TensorFiles(directory, device)
        check_names(self._files.tensors, config, directory, gguf=False)
        self._quantization = config.quantization
        self._reader = _reader(config.quantization) if config.quantization else None
        self._dtype = dtype

    def has(self, tensor: str) -> bool:
        """See WeightSource."""
        return tensor in self._files

    def vector(self, tensor: str, size: int, run: range) -> Tensor:
        """See WeightSource."""
        return self._files.floats(tensor, (size,), run).to(self._dtype)

    def rows(self, tensor: str, shape: tuple[int, int], run: range) -> Tensor:
        """See WeightSource."""
        return self._files.floats(tensor, shape, run).to(self._dtype)

    def linear(self, run: LinearRun) -> Weight:
        """See WeightSource."""
        if self._reader and self._quantization and self.has(f"{run.module}.{self._reader.marker}"):
            scheme = self._quantization.scheme(run.module)
            return finish(self._reader.read(self._files, run, scheme), self._dtype)
        dense = self._files.floats(f"{run.module}.weight", (run.n, run.k), run.columns, run.rows)
        return dense.to(self._dtype)

    @property
    def bytes_read(self) -> int:
        """See WeightSource."""
        return self._files.bytes_read

    def close(self) -> None:
        """See WeightSource."""
        self._files.close()


def _reader(quantization: QuantConfig) -> PackedReader:
    if quantization.method == AWQ:
        return AwqReader()
    if quantization.method == GPTQ:
        return GptqReader(v2=quantization.checkpoint_format == "gptq_v2")
    return CompressedTensorsReader()
