"""What every launcher checks before a kernel reads memory, and the error it raises."""

from __future__ import annotations

import torch
from torch import Tensor

from batchtp.errors import KernelInputError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    like: Tensor,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Raises KernelInputError unless `tensor` has this shape (None: any), device and dtype.

    Its last dimension must be contiguous.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted_shape = ["any" if size is None else size for size in shape]
        raise KernelInputError(f"{name} is {list(tensor.shape)}; it must be {wanted_shape}.")
    if tensor.device != like.device:
        raise KernelInputError(f"{name} is on {tensor.device}; it must be on {like.device}.")
    if tensor.dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise KernelInputError(f"{name} is {tensor.dtype}; it must be one of {known}.")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelInputError(f"{name}'s last dimension is strided; call contiguous() first.")


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()
