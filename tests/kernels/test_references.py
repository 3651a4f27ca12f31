"""The path taken on a CPU: references against their definitions, and linears as prepared there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

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
)

from batchtp.errors import KernelInputError
from batchtp.kernels import int4_matmul, linear, ops, packed, paged_attention, silu_mul
from batchtp.kernels.weights import Int4Weight

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_a_prepared_linear_is_the_int4_matmul(case: Matmul, dtype: torch.dtype) -> None:
    weight = make_weight(case)
    x, bias = make_x(case, dtype)
    wanted = product(x, weight, bias)
    assert error(ops.int4_matmul(x, weight, bias), wanted) < TOLERANCE[dtype]
    # The dense form rounds every weight too, which a sum that cancels magnifies.
    assert error(ops.linear(x, ops.prepare(weight, dtype), bias), wanted) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_the_cpu_int4_op_computes_the_weight(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_has_bfloat16", lambda: True)
    weight = make_weight(Matmul(rows, 256, 64, 32))
    prepared = ops.prepare(weight, torch.bfloat16)
    assert isinstance(prepared, linear.CpuInt4)
    x, bias = torch.randn(rows, 256).bfloat16(), torch.randn(64).bfloat16()
    wanted = product(x, weight, bias)
    # Its scales and shifts are rounded to bfloat16 too.
    assert error(ops.linear(x, prepared, bias), wanted) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "case",
    [
        Matmul(1, 256, 40, 32),
        Matmul(1, 240, 64, 32),
        Matmul(1, 256, 64, 64, offset=32),
        Matmul(1, 256, 64, 64, act_order=True),
        Matmul(1, 256, 64, 16),
    ],
    ids=str,
)
def test_the_cpu_int4_op_is_not_given_what_it_cannot_compute(case: Matmul) -> None:
    assert not linear.fits_cpu_op(make_weight(case))


def test_a_dense_weight_is_a_plain_linear() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    y = ops.linear(x, ops.prepare(weight, torch.float32), bias)
    torch.testing.assert_close(y, x @ weight.t() + bias)


@DTYPES
@pytest.mark.parametrize("case", ATTENDS, ids=str)
def test_paged_attention(case: Attend, dtype: torch.dtype) -> None:
    given = make_attend(case, dtype)
    y = ops.paged_attention(*given.tensors, *given.scalars)
    assert error(y, naive_attention(given)) < TOLERANCE[dtype]


def test_padding_of_a_batched_decode_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "_MOST_GATHERED", 5000)
    given = make_attend(Attend([5, 20, 3, 9], [1, 1, 1, 1]), torch.float32)
    y = ops.paged_attention(*given.tensors, *given.scalars)
    assert error(y, naive_attention(given)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(31, 64, dtype=torch.int32)}, "qweight"),
        ({"scales": torch.ones(2, 63)}, "scales"),
        ({"zeros": torch.ones(3, 64)}, "zeros"),
        ({"group_index": torch.zeros(9, dtype=torch.int32)}, "group_index"),
        ({"group_size": 64}, "2 groups"),
        ({"first_group_offset": 128}, "offset 128"),
    ],
)
def test_a_weight_that_does_not_fit_together_is_refused(
    change: dict[str, object], message: str
) -> None:
    weight: Int4Weight = replace(make_weight(Matmul(1, 256, 64, 128)), **change)
    with pytest.raises(KernelInputError, match=message):
        packed.pack(weight)
    with pytest.raises(KernelInputError, match=message):
        ops.prepare(weight, torch.float32)


def test_launchers_refuse_what_their_kernels_cannot_compute() -> None:
    weight = make_weight(Matmul(1, 256, 64, 128))
    with pytest.raises(KernelInputError, match="x is \\[3, 255\\]"):
        int4_matmul.launch(torch.zeros(3, 255), weight)
    with pytest.raises(KernelInputError, match="float64"):
        int4_matmul.launch(torch.zeros(3, 256, dtype=torch.float64), weight)
    with pytest.raises(KernelInputError, match="bias"):
        int4_matmul.launch(torch.zeros(3, 256), weight, torch.zeros(63))
    with pytest.raises(KernelInputError, match="strided"):
        int4_matmul.launch(torch.zeros(256, 3).t(), weight)
    with pytest.raises(KernelInputError, match="equally wide"):
        silu_mul.launch(torch.zeros(2, 5))
    given = make_attend(Attend([5], [1], head_dim=320), torch.float32)
    with pytest.raises(KernelInputError, match="320"):
        paged_attention.launch(*given.tensors, *given.scalars)
    given = make_attend(Attend([5], [1], q_heads=5), torch.float32)
    with pytest.raises(KernelInputError, match="5 q heads"):
        paged_attention.launch(*given.tensors, *given.scalars)


def test_a_step_of_no_tokens_or_no_heads_is_empty() -> None:
    given = make_attend(Attend([5], [1]), torch.float32)
    q, *rest = given.tensors
    assert paged_attention.launch(q[:, :0], *rest, *given.scalars).shape == (1, 0, 64)
    weight = make_weight(Matmul(1, 256, 64, 128))
    assert int4_matmul.launch(torch.zeros(0, 256), weight).shape == (0, 64)
    assert silu_mul.launch(torch.zeros(0, 6)).shape == (0, 3)


def test_a_cpu_rank_never_imports_triton() -> None:
    script = (
        "import sys, torch\n"
        "from batchtp.kernels import ops\n"
        "ops.silu_mul(torch.zeros(1, 2))\n"
        "sys.exit('triton' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
