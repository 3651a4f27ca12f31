"""A checksum of a tensor's bytes, computed where the tensor is.

    words    the bytes as int64, zero bytes after the last
    sum      over chunks c of 2^20 words:  h = h * 1000003 + sum_i (2 i + 1) words[c, i]   mod 2^64

Exact integer arithmetic: the same number on every device. It finds what goes wrong by accident
(flipped, lost, moved, foreign bytes), not what is forged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 20
_STEP = 1_000_003
_WORD_BYTES = 8


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """The checksum of each, in one round trip to their device."""
    found = [_checksum(tensor) for tensor in tensors]
    if not found:
        return []
    numbers: list[int] = torch.stack(found).tolist()
    return numbers


def _checksum(tensor: Tensor) -> Tensor:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _words(octets[:whole])
    odd = _odd_numbers(min(_CHUNK_WORDS, words.numel()), tensor.device)
    for first in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[first : first + _CHUNK_WORDS]
        total = total * _STEP + (chunk * odd[: chunk.numel()]).sum()
    tail = octets[whole:].to(torch.int64)
    shifts = torch.arange(0, 8 * tail.numel(), 8, device=tensor.device)
    return total * _STEP + (tail << shifts).sum() + octets.numel()


def _words(octets: Tensor) -> Tensor:
    # A view needs its start on a word.
    aligned = octets if octets.data_ptr() % _WORD_BYTES == 0 else octets.clone()
    return aligned.view(torch.int64)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
