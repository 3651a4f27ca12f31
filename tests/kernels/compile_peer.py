"""Compile the kernels that launchers would launch on an H200, on a machine without one.

Prints a line a kernel: name, bytes of shared memory, tensor core instructions.
"""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import Attend, Matmul, make_attend, make_weight
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from batchtp.kernels import int4_matmul, paged_attention, rms_norm, silu_mul
from batchtp.kernels.weights import ZeroKind


class H200:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    driver.set_active(H200())
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = launch(self, *args, **{**kwargs, "warmup": True})
        ptx = compiled.asm["ptx"]
        tensor_core = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
        print(compiled.metadata.name, compiled.metadata.shared, tensor_core)
        return compiled

    JITFunction.run = compile_only
    weight = make_weight(Matmul(1, 1024, 1024, 128))
    int4_matmul.launch(torch.empty(1, 1024, dtype=torch.float16), weight)
    int4_matmul.launch(torch.empty(128, 1024, dtype=torch.bfloat16), weight)
    weight = make_weight(Matmul(1, 576, 1024, 32, ZeroKind.MINIMUM))
    int4_matmul.launch(torch.empty(128, 576, dtype=torch.float16), weight)
    for case in (
        Attend([2000, 3], [1, 1], head_dim=128),
        Attend([300, 3], [300, 1], head_dim=256, window=9),
    ):
        given = make_attend(case, torch.bfloat16)
        paged_attention.launch(*given.tensors, *given.scalars)
    x = torch.empty(4, 8192, dtype=torch.bfloat16)
    rms_norm.launch(x, x[0], 1e-5, x)
    silu_mul.launch(x)


if __name__ == "__main__":
    main()
