"""Which implementation computes on a tensor's device."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

from torch import Tensor


def uses_triton(x: Tensor) -> bool:
    """Triton for CUDA tensors; torch for CPU tensors unless the interpreter was asked for."""
    return _has_triton() if x.is_cuda else _interprets()


@functools.cache
def _interprets() -> bool:
    wanted = os.environ.get("BATCHTP_KERNELS") == "triton"
    return wanted and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed: the GPU computes with the slow torch references. "
        "Install it with `pip install triton`.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
