"""Every kernel in Triton's interpreter against float64.

The interpreter gets bfloat16 products wrong without an error, so it is not tried here.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
)

from batchtp.kernels import (
    int4_matmul,
    paged_attention,
    rms_norm,
    rope_and_cache,
    silu_mul,
)
from batchtp.kernels.packed import pack
from batchtp.kernels.weights import ZeroKind

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs these kernels itself"),
    pytest.mark.usefixtures("poisoned"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)


def matmul_error(case: Matmul, dtype: torch.dtype) -> float:
    weight = make_weight(case)
    x, bias = make_x(case, dtype)
    wanted = product(x, weight, bias)
    y = int4_matmul.launch(x, weight, bias)
    assert y.dtype is dtype
    return error(y, wanted)


@DTYPES
@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_int4_matmul(case: Matmul, dtype: torch.dtype) -> None:
    assert matmul_error(case, dtype) < TOLERANCE[dtype]


@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        Matmul,
        m=st.integers(1, 20),
        k=st.integers(1, 150),
        n=st.integers(1, 70),
        group_size=st.sampled_from([1, 8, 16, 24, 32, 48, 64, 128]),
        zero_kind=st.sampled_from(ZeroKind),
        act_order=st.booleans(),
        bias=st.booleans(),
    ).flatmap(
        lambda case: st.integers(0, case.group_size - 1).map(
            lambda offset: Matmul(**{**vars(case), "offset": offset})
        )
    )
)
def test_int4_matmul_of_any_shape(case: Matmul) -> None:
    assert matmul_error(case, torch.float32) < TOLERANCE[torch.float32]


def test_shares_of_k_are_added_in_the_same_order_by_one_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = pack(make_weight(Matmul(2, 1100, 64, 128)))
    assert weight.splits > 1
    x = torch.randn(2, 1100)
    by_many = int4_matmul.launch(x, weight)
    monkeypatch.setattr(int4_matmul, "_ENOUGH_PROGRAMS", 1)
    assert torch.equal(int4_matmul.launch(x, weight), by_many)


@DTYPES
@pytest.mark.parametrize("case", ATTENDS, ids=str)
def test_paged_attention(case: Attend, dtype: torch.dtype) -> None:
    given_ = make_attend(case, dtype)
    y = paged_attention.launch(*given_.tensors, *given_.scalars, split=case.split)
    assert error(y, naive_attention(given_)) < TOLERANCE[dtype]


def test_attention_skips_sequences_without_queries() -> None:
    given_ = make_attend(Attend([5, 9, 3], [2, 0, 1]), torch.float32)
    y = paged_attention.launch(*given_.tensors, *given_.scalars)
    assert error(y, naive_attention(given_)) < TOLERANCE[torch.float32]


@DTYPES
@pytest.mark.parametrize("width", [1, 100, 576])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 2 * width)[:, :width].to(dtype), torch.randn(3, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    for added in (None, residual):
        y, total = rms_norm.launch(x, weight, 1e-5, added)
        wanted, wanted_total = rms_norm.reference(x.double(), weight.double(), 1e-5, None)
        if added is not None:
            wanted_total = x + added
            wanted, _ = rms_norm.reference(wanted_total.double(), weight.double(), 1e-5, None)
        assert torch.equal(total, wanted_total.to(dtype))
        assert error(y, wanted) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("width", [1, 1030])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * width).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert error(silu_mul.launch(gate_up), gate * up / (1 + torch.exp(-gate))) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(3, 2, 80), (2, 0, 64), (0, 1, 16)])
def test_rope_and_cache(q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    # One row a token, as a fused projection gives them: no head's stride is its own size.
    sizes = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    row = torch.randn(5, sum(sizes)).to(dtype)
    q, k, v = (
        (part.reshape(5, -1, dim) for part in row.split(sizes, dim=-1))
        if kv_heads
        else (
            row.reshape(5, q_heads, dim),
            row.new_zeros(5, 0, dim),
            row.new_zeros(5, 0, dim),
        )
    )
    caches = [torch.randn(3, 4, kv_heads, dim).to(dtype) for _ in "kv"]
    wanted_caches = [cache.clone() for cache in caches]
    positions, slots = torch.randint(0, 9, (5,)), torch.randperm(12)[:5]
    table = torch.randn(9, dim)
    rotated = rope_and_cache.launch(q, k, v, positions, table, *caches, slots)
    wanted = rope_and_cache.reference(q, k, v, positions, table, *wanted_caches, slots)
    if q_heads:
        assert error(rotated, wanted) < TOLERANCE[dtype]
    for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(cache, wanted_cache)
