"""Triton kernels beside their references, without Triton where no kernel is launched.

A kernel's file holds its torch reference too, which a machine without a GPU runs; Triton is not
even installable on some of them. So `@kernel` only keeps the function. The first launch imports
Triton, gives the file its name `tl` and puts compiled kernels in the place of all kept ones:
from then on a launch is Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that nobody has launched yet; `kernel[grid](...)` launches it."""

    function: Callable[..., Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        scope = self.function.__globals__
        _compile_all(scope)
        return scope[self.function.__name__][grid]


def kernel(function: Callable[..., Any]) -> Any:
    """Mark a function as a Triton kernel, or as a function that kernels of its file call."""
    return Kernel(function)


def _compile_all(scope: dict[str, Any]) -> None:
    import triton
    import triton.language

    scope["tl"] = triton.language
    kept = [(name, value) for name, value in scope.items() if isinstance(value, Kernel)]
    for name, value in kept:
        scope[name] = triton.jit(value.function)
