"""A GGUF file as a WeightSource. A block is 32 weights along K:

    Q4_0  scale f16 | 16 bytes      w = (q - 8) * scale      an int4 group with zero point 8
    Q4_1  scale f16 | minimum f16 | 16 bytes      w = q * scale + minimum      ZeroKind.MINIMUM
    Q8_0  scale f16 | 32 int8       w = q * scale            dequantised

In the 16 bytes of a 4-bit block the low nibbles are weights 0 to 15 and the high ones 16 to 31.
Files of the llama architecture hold the rows of q and k with the two halves of each head
interleaved, for a rotary embedding of neighbouring pairs; they are put back in order here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from batchtp.errors import CheckpointError
from batchtp.kernels.weights import Int4Weight, ZeroKind
from batchtp.model.config_records import ModelConfig
from batchtp.model.gguf import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q8_0,
    BlockType,
    GgufTensor,
    open_gguf,
    read_blocks,
)
from batchtp.model.names import K, Q, check_names, gguf_module
from batchtp.model.ranged import RangedFile
from batchtp.model.readers.packed import LinearRun, covering, rows_from, unpack_rows
from batchtp.model.readers.source import Weight

_BLOCK = 32
_NIBBLE_BYTES = 16
_FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


class GgufSource:
    """See WeightSource."""

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises CheckpointError for a file that is cut short or holds unknown tensors."""
        self._file = open_gguf(path)
        check_names(self._file.tensors, config, path, gguf=True)
        self._opened = RangedFile(path)
        self._head_dim = config.head_dim
        self._interleaved = self._file.keys["general.architecture"] == "llama"
        self._dtype = dtype
        self._device = device

    def has(self, tensor: str) -> bool:
        """See WeightSource."""
        return _gguf_name(tensor) in self._file.tensors

    def vector(self, tensor: str, size: int, run: range) -> Tensor:
        """See WeightSource."""
        found = self._tensor(tensor, (size,))
        whole = self._dense(found, range(1), range(size))[0]
        return self._in_order(tensor.rpartition(".")[0], whole[run.start : run.stop])

    def rows(self, tensor: str, shape: tuple[int, int], run: range) -> Tensor:
        """See WeightSource."""
        return self._dense(self._tensor(tensor, shape), run, range(shape[1]))

    def linear(self, run: LinearRun) -> Weight:
        """See WeightSource."""
        tensor = self._tensor(f"{run.module}.weight", (run.n, run.k))
        if tensor.type in (Q4_0, Q4_1):
            return self._int4(tensor, run)
        return self._in_order(run.module, self._dense(tensor, run.columns, run.rows))

    def close(self) -> None:
        """See WeightSource."""
        self._opened.close()

    @property
    def bytes_read(self) -> int:
        """See WeightSource."""
        return self._opened.bytes_read

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._file.tensors.get(_gguf_name(name))
        if tensor is None:
            raise CheckpointError(f"{self._file.path} has no tensor {_gguf_name(name)}.")
        if tensor.shape != shape:
            raise CheckpointError(
                f"Tensor {tensor.name} in {self._file.path} has shape {list(tensor.shape)}; the "
                f"config implies {list(shape)}."
            )
        return tensor

    def _blocks(self, tensor: GgufTensor, rows: range, blocks: range) -> Tensor:
        """uint8 [rows, blocks, bytes of a block], on the device."""
        raw = read_blocks(self._opened, tensor, rows, blocks)
        shape = (len(rows), len(blocks), tensor.type.size)
        return torch.from_numpy(raw).to(self._device).view(shape)

    def _dense(self, tensor: GgufTensor, rows: range, columns: range) -> Tensor:
        """A run of any tensor, dequantised in float32: [rows, columns]."""
        blocks = self._blocks(tensor, rows, covering(columns, tensor.type.weights))
        values = _values(blocks, tensor.type).flatten(1)
        skip = columns.start % tensor.type.weights
        return values[:, skip : skip + len(columns)].to(self._dtype).contiguous()

    def _int4(self, tensor: GgufTensor, run: LinearRun) -> Int4Weight:
        skip = run.rows.start % _BLOCK
        blocks = self._blocks(tensor, run.columns, covering(run.rows, _BLOCK))
        blocks = self._in_order(run.module, blocks)
        scales = _halves(blocks[..., :2])[..., 0].t().contiguous()
        if tensor.type is Q4_1:
            zeros, kind = _halves(blocks[..., 2:4])[..., 0].t().contiguous(), ZeroKind.MINIMUM
        else:
            zeros, kind = torch.full_like(scales, 8, dtype=torch.uint8), ZeroKind.INTEGER
        words = _words(blocks[..., -_NIBBLE_BYTES:]).t()
        words = words[skip // 8 : -(-(skip + len(run.rows)) // 8)]
        return Int4Weight(
            qweight=rows_from(words, 4, run.rows).contiguous(),
            scales=scales,
            zeros=zeros,
            zero_kind=kind,
            k=len(run.rows),
            n=len(run.columns),
            group_size=_BLOCK,
            first_group_offset=skip,
        )

    def _in_order(self, module: str, rows: Tensor) -> Tensor:
        """Whole heads of q or k, each head's rows in the order of a split rotary embedding."""
        if not self._interleaved or not module.endswith((Q, K)):
            return rows
        pairs = rows.reshape(-1, self._head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).flatten(0, 2)


def _gguf_name(tensor: str) -> str:
    module, _, part = tensor.rpartition(".")
    return f"{gguf_module(module)}.{part}"


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _values(blocks: Tensor, kind: BlockType) -> Tensor:
    """float32 [rows, blocks, weights]."""
    if kind in _FLOATS:
        return blocks.view(_FLOATS[kind]).float()
    scales = _halves(blocks[..., :2]).float()
    if kind is Q8_0:
        return blocks[..., 2:].view(torch.int8).float() * scales
    nibbles = unpack_rows(_words(blocks[..., -_NIBBLE_BYTES:]).t(), 4).t().float()
    q = nibbles.reshape(*blocks.shape[:2], _BLOCK)
    if kind is Q4_1:
        return q * scales + _halves(blocks[..., 2:4]).float()
    return (q - 8) * scales


def _words(raw: Tensor) -> Tensor:
    """Nibble bytes [n, blocks, 16] to words in order of K: int32 [n, blocks * 4]."""
    octets = raw.contiguous().view(torch.int64)
    return torch.cat((_gathered(octets), _gathered(octets >> 4)), dim=-1).flatten(1)


def _gathered(octets: Tensor) -> Tensor:
    """The low nibbles of eight bytes side by side: int64 to int32, halving the gaps each time."""
    x = octets & 0x0F0F0F0F0F0F0F0F
    x = (x | (x >> 4)) & 0x00FF00FF00FF00FF
    x = (x | (x >> 8)) & 0x0000FFFF0000FFFF
    x = (x | (x >> 16)) & 0xFFFFFFFF
    return x.to(torch.int32)
