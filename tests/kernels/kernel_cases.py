"""What the kernels are tried on, in the interpreter and on a GPU alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchtp.kernels.weights import Int4Weight, ZeroKind, dequantize, pack

# Rounding of the result, and of the weights where groups do not line up, by the dtype's digits.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 2e-6}


def error(y: Tensor, wanted: Tensor) -> float:
    """||y - wanted|| / ||wanted|| in float64; NaN anywhere makes it NaN."""
    y, wanted = y.double().cpu(), wanted.double().cpu()
    return float((y - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class Matmul:
    """Shapes and format of one int4 matmul."""

    m: int
    k: int
    n: int
    group_size: int
    zero_kind: ZeroKind = ZeroKind.INTEGER
    offset: int = 0
    act_order: bool = False
    bias: bool = False
    scales: torch.dtype = torch.float16


_MINIMUM = ZeroKind.MINIMUM
MATMULS = (
    Matmul(1, 256, 64, 32),
    Matmul(3, 256, 96, 64, bias=True),
    Matmul(2, 384, 40, 128),
    Matmul(1, 192, 33, 32, _MINIMUM),
    Matmul(5, 576, 16, 32, _MINIMUM, bias=True),
    Matmul(2, 200, 31, 200),
    Matmul(3, 77, 24, 77, _MINIMUM),
    Matmul(2, 130, 48, 24, bias=True),
    Matmul(2, 128, 64, 64, offset=32),
    Matmul(2, 128, 64, 64, offset=13),
    Matmul(1, 96, 17, 128, _MINIMUM, offset=96),
    Matmul(4, 200, 32, 64, act_order=True),
    Matmul(2, 64, 32, 32, _MINIMUM, act_order=True, bias=True),
    Matmul(17, 128, 65, 16),
    Matmul(33, 130, 64, 128, scales=torch.float32),
    Matmul(2, 1, 1, 1),
    Matmul(1, 1100, 64, 128, bias=True),
)


def make_weight(case: Matmul, seed: int = 0) -> Int4Weight:
    """A random weight of the case's format, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-(case.k + case.offset) // case.group_size)
    shape = (groups, case.n)
    scales = (torch.rand(shape, generator=g) * 0.01 + 0.001).to(case.scales)
    if case.zero_kind is ZeroKind.INTEGER:
        # 16 is what a stored 15 plus one means in GPTQ's older format.
        zeros = torch.randint(0, 17, shape, generator=g).to(torch.uint8)
    else:
        zeros = (torch.randn(shape, generator=g) * 0.05).to(case.scales)
    index = None
    if case.act_order:
        index = torch.randint(0, groups, (case.k,), generator=g, dtype=torch.int32)
    return Int4Weight(
        qweight=pack(torch.randint(0, 16, (case.k, case.n), generator=g)),
        scales=scales,
        zeros=zeros,
        zero_kind=case.zero_kind,
        k=case.k,
        n=case.n,
        group_size=case.group_size,
        first_group_offset=case.offset,
        group_index=index,
    )


def make_x(case: Matmul, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Random x and, where the case has one, bias, on the CPU."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn((case.m, case.k), generator=g).to(dtype)
    return x, torch.randn(case.n, generator=g).to(dtype) if case.bias else None


def product(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """The definition, in float64."""
    y = x.double() @ dequantize(weight, torch.float64)
    return y if bias is None else y + bias.double()


def to_device(weight: Int4Weight, device: str) -> Int4Weight:
    """The weight with its tensors there."""
    index = weight.group_index
    return replace(
        weight,
        qweight=weight.qweight.to(device),
        scales=weight.scales.to(device),
        zeros=weight.zeros.to(device),
        group_index=None if index is None else index.to(device),
    )


@dataclass(frozen=True)
class Attend:
    """One step over a paged cache: tokens in the cache and queries of every sequence."""

    lengths: Sequence[int]
    queries: Sequence[int]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    q_per_kv: int = 2
    first_q: int = 0
    window: int = 0
    block_size: int = 16
    split: bool | None = None


ATTENDS = (
    Attend([5, 20, 3], [1, 1, 1]),
    Attend([5, 20, 3], [5, 4, 1]),
    Attend([40, 33], [40, 1], q_heads=5, kv_heads=2, head_dim=80, q_per_kv=3),
    Attend([40, 70], [3, 1], head_dim=96, q_per_kv=3, first_q=2, window=20),
    Attend([70], [70], q_heads=2, kv_heads=2, q_per_kv=1, window=7, block_size=8),
    Attend([20, 9], [1, 2], q_heads=7, kv_heads=1, q_per_kv=7, head_dim=128),
    Attend([6, 4], [1, 1], q_heads=2, kv_heads=1, head_dim=256),
    Attend([530, 17], [1, 1], kv_heads=1, q_per_kv=4, split=True),
    Attend([530, 700], [1, 1], kv_heads=1, q_per_kv=4, window=100, split=True),
    Attend([530, 700], [1, 1], kv_heads=1, q_per_kv=4, window=100, split=False),
)


@dataclass(frozen=True)
class AttendInput:
    """The tensors of a case, in the order of the kernel's arguments."""

    tensors: tuple[Tensor, ...]
    scalars: tuple[float, int, int, int]

    def to(self, device: str) -> AttendInput:
        """The same there."""
        return replace(self, tensors=tuple(tensor.to(device) for tensor in self.tensors))

    def doubled(self) -> AttendInput:
        """The same with its floats in float64."""
        wide = (t.double() if t.is_floating_point() else t for t in self.tensors)
        return replace(self, tensors=tuple(wide))


def make_attend(case: Attend, dtype: torch.dtype) -> AttendInput:
    """Random tensors, on the CPU; cache rows that belong to nobody are NaN."""
    g = torch.Generator().manual_seed(1)
    rows = case.block_size
    blocks = [-(-length // rows) for length in case.lengths]
    shape = (sum(blocks) + 2, rows, case.kv_heads, case.head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in "kv")
    tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32)
    free = iter(torch.randperm(shape[0], generator=g).tolist())
    for s, length in enumerate(case.lengths):
        for b in range(blocks[s]):
            block = next(free)
            tables[s, b] = block
            used = min(rows, length - b * rows)
            for cache in (keys, values):
                cache[block, :used] = torch.randn((used, *shape[2:]), generator=g).to(dtype)
    q = torch.randn((sum(case.queries), case.q_heads, case.head_dim), generator=g).to(dtype)
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return AttendInput(
        (q, keys, values, tables, starts, lengths),
        (case.head_dim**-0.5, case.q_per_kv, case.first_q, case.window),
    )


def naive_attention(given: AttendInput) -> Tensor:
    """Attention token by token in float64: the definition."""
    q, keys, values, tables, starts, lengths = given.doubled().tensors
    scale, q_per_kv, first_q, window = given.scalars
    y = torch.empty_like(q)
    heads = (torch.arange(q.shape[1]) + first_q) // q_per_kv
    for s, length in enumerate(lengths.tolist()):
        slots = torch.arange(length)
        blocks = tables[s].long()[slots // keys.shape[1]]
        k, v = (cache[blocks, slots % keys.shape[1]] for cache in (keys, values))
        first, last = starts[s : s + 2].tolist()
        for t in range(first, last):
            end = length - (last - 1 - t)
            begin = max(0, end - window) if window else 0
            scores = torch.einsum("lhd,hd->lh", k[begin:end][:, heads], q[t])
            p = torch.softmax(scale * scores, 0)
            y[t] = torch.einsum("lh,lhd->hd", p, v[begin:end][:, heads])
    return y
