"""The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Triton's own functions are made for the interpreter, or not, when Triton is imported: this has to
# come before the first kernel of the session. Nothing else of batchtp asks for the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is NaN: torch.empty fills it in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
