"""What the interpreter does not see: the kernels compile for an H200 and fit its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# An H100's or H200's most for one program (CUDA programming guide, compute capability 9.0).
_SHARED_BYTES = 227 * 1024
_ON_TENSOR_CORES = {"_int4_matmul", "_paged_attention"}


def test_kernels_compile_and_fit() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    peer = Path(__file__).with_name("compile_peer.py")
    done = subprocess.run(
        [sys.executable, str(peer)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in kernels} >= {
        *_ON_TENSOR_CORES,
        "_add_shares",
        "_merge_segments",
        "_rms_norm",
        "_silu_mul",
    }
    for name, shared, tensor_core in kernels:
        assert int(shared) <= _SHARED_BYTES, name
        assert (int(tensor_core) > 0) == (name in _ON_TENSOR_CORES), name
