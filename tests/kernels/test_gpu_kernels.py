"""Every kernel on a GPU against float64, and what its docstring promises beyond the numbers."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    ATTENDS,
    MATMULS,
    TOLERANCE,
    Attend,
    Matmul,
    error,
    make_attend,
    make_weight,
    make_x,
    naive_attention,
    product,
    to_device,
)

from batchtp.kernels import (
    int4_matmul,
    ops,
    paged_attention,
    rms_norm,
    rope_and_cache,
    silu_mul,
)
from batchtp.kernels.packed import pack
from batchtp.kernels.weights import ZeroKind

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
# Every tile of the table, whole and partly filled, and K shared out among programs or not.
LARGE_MATMULS = (
    *(Matmul(m, 1024, 1000, 128, bias=True) for m in (1, 16, 17, 32, 50, 64, 65, 128, 300)),
    Matmul(2048, 4096, 4096, 128),
    Matmul(1, 14336, 4096, 128),
    Matmul(256, 8192, 2560, 32, ZeroKind.MINIMUM),
    Matmul(16, 4096, 4096, 4096),
    Matmul(7, 8192, 1024, 64, scales=torch.bfloat16),
    Matmul(100, 1792, 4096, 128, offset=64),
    Matmul(130, 576, 1536, 32, ZeroKind.MINIMUM),
    Matmul(64, 4096, 1024, 128, act_order=True),
)
LARGE_ATTENDS = (
    Attend([4096] * 3, [1] * 3, q_heads=8, q_per_kv=4, head_dim=128),
    Attend([600] * 300, [1] * 300, q_heads=8, q_per_kv=4, head_dim=128),
    Attend([1500, 2, 777], [900, 1, 100], q_heads=8, q_per_kv=4, head_dim=128),
    Attend([300, 130], [300, 130], q_heads=8, q_per_kv=4, head_dim=256, window=64),
    Attend([3000], [1], q_heads=5, q_per_kv=3, head_dim=64, first_q=1, window=1000),
)


@DTYPES
@pytest.mark.parametrize("case", [*MATMULS, *LARGE_MATMULS], ids=str)
def test_int4_matmul(case: Matmul, dtype: torch.dtype) -> None:
    weight = make_weight(case)
    x, bias = make_x(case, dtype)
    wanted = product(x, weight, bias)
    on_gpu = to_device(weight, "cuda")
    y = ops.int4_matmul(x.cuda(), on_gpu, None if bias is None else bias.cuda())
    assert y.dtype is dtype
    assert error(y, wanted) < TOLERANCE[dtype]
    prepared = ops.prepare(on_gpu, dtype)
    again = ops.linear(x.cuda(), prepared, None if bias is None else bias.cuda())
    assert torch.equal(y, again), "not deterministic"


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (14336, 512), (576, 960)])
def test_a_row_does_not_depend_on_its_neighbours(k: int, n: int, dtype: torch.dtype) -> None:
    group_size = 128 if k % 128 == 0 else 32
    packed = pack(to_device(make_weight(Matmul(1, k, n, group_size)), "cuda"))
    x = torch.randn((300, k), device="cuda", dtype=torch.float32).to(dtype)
    alone = int4_matmul.launch(x[:1], packed)
    for m in (2, 16, 17, 40, 64, 65, 128, 300):
        assert torch.equal(int4_matmul.launch(x[:m], packed)[:1], alone), f"M={m}"


@DTYPES
def test_the_largest_offsets_do_not_overflow(dtype: torch.dtype) -> None:
    # x has more elements than int32 counts; its last rows are the ones looked at.
    rows = (1 << 31) // 4096 + 64
    weight = make_weight(Matmul(1, 4096, 16, 128))
    x = torch.zeros((rows, 4096), dtype=dtype, device="cuda")
    x[-8:] = torch.randn((8, 4096), device="cuda").to(dtype)
    y = ops.linear(x, ops.prepare(to_device(weight, "cuda"), dtype), None)
    wanted = product(x[-8:].cpu(), weight, None)
    assert error(y[-8:], wanted) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("case", [*ATTENDS, *LARGE_ATTENDS], ids=lambda case: str(case)[:60])
def test_paged_attention(case: Attend, dtype: torch.dtype) -> None:
    given = make_attend(case, dtype)
    y = paged_attention.launch(*given.to("cuda").tensors, *given.scalars, split=case.split)
    small = sum(case.lengths) < 3000
    wide = given.doubled()
    wanted = (
        naive_attention(given) if small else paged_attention.reference(*wide.tensors, *wide.scalars)
    )
    assert error(y, wanted) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("width", [1, 576, 4096, 16384])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(37, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    for added in (None, residual):
        y, total = rms_norm.launch(
            x.cuda(), weight.cuda(), 1e-5, None if added is None else added.cuda()
        )
        wanted_total = x if added is None else x + added
        wanted, _ = rms_norm.reference(wanted_total.double(), weight.double(), 1e-5)
        assert torch.equal(total.cpu(), wanted_total)
        assert error(y, wanted) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("width", [1, 1536, 14336])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(33, 2 * width).to(dtype)
    wanted = silu_mul.reference(gate_up.double())
    assert error(silu_mul.launch(gate_up.cuda()), wanted) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(8, 2, 128), (3, 2, 80), (0, 1, 64)])
def test_rope_and_cache(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    sizes = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    row = torch.randn(50, sum(sizes)).to(dtype)
    parts = [part.reshape(50, -1, dim) for part in row.cuda().split(sizes, dim=-1)]
    wanted_parts = [part.reshape(50, -1, dim) for part in row.split(sizes, dim=-1)]
    wanted_caches = [torch.randn(9, 16, kv_heads, dim).to(dtype) for _ in "kv"]
    caches = [cache.cuda() for cache in wanted_caches]
    positions, slots = torch.randint(0, 99, (50,)), torch.randperm(144)[:50]
    table = torch.randn(99, dim)
    rotated = rope_and_cache.launch(*parts, positions.cuda(), table.cuda(), *caches, slots.cuda())
    wanted = rope_and_cache.reference(*wanted_parts, positions, table, *wanted_caches, slots)
    if q_heads:
        assert error(rotated, wanted) < TOLERANCE[dtype]
    for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
        assert error(cache, wanted_cache) < TOLERANCE[dtype]
