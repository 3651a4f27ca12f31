"""Every checkpoint at every TP degree from 1 to 8, by real processes over gloo.

The expected logits come from the tools that wrote the checkpoints (tests/data/checkpoints/README).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_driver import all_checkpoints
from torch import Tensor

PEER = Path(__file__).parent / "degree_peer.py"
TESTS = Path(__file__).parent.parent
DEGREES = range(1, 9)
DEADLINE_SECS = 170
# Exact dequantisation in float32; 1e-5 is what was seen when the expected values were made.
TOLERANCE = 1e-4

Logits = Mapping[str, list[Tensor]]


@pytest.fixture(scope="module", params=DEGREES, ids=lambda tp: f"tp{tp}")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """The logits of every checkpoint at one degree."""
    tp = request.param
    folder = tmp_path_factory.mktemp(f"tp{tp}")
    names = folder / "names.json"
    names.write_text(json.dumps([str(path) for path in all_checkpoints()]))
    output = folder / "logits.pt"
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    peers = [
        subprocess.Popen(
            [sys.executable, str(PEER), str(rank), str(tp), str(folder / "store"), output, names],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        ends = [(peer.communicate(timeout=DEADLINE_SECS)[1], peer.returncode) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    for rank, (said, status) in enumerate(ends):
        assert status == 0, f"rank {rank} of {tp}:\n{said}"
    found: Logits = torch.load(output)
    return found


@pytest.mark.parametrize("checkpoint", all_checkpoints(), ids=lambda path: path.name)
def test_logits_and_greedy_tokens_are_the_expected_ones(computed: Logits, checkpoint: Path) -> None:
    expected = np.load(checkpoint / "expected_logits.npz")
    prompts = json.loads((checkpoint / "expected.json").read_text())["prompts"]
    for i, (prompt, logits) in enumerate(zip(prompts, computed[str(checkpoint)], strict=True)):
        last = len(prompt["ids"]) - 1
        wanted = torch.from_numpy(expected[f"prompt{i}_last_logits"])
        assert (logits[last] - wanted).abs().max() <= TOLERANCE
        drawn = logits.argmax(-1)
        assert drawn[last:].tolist() == prompt["greedy_ids"]
        clear = torch.from_numpy(expected[f"prompt{i}_margin"]) > 2 * TOLERANCE
        argmax = torch.from_numpy(expected[f"prompt{i}_argmax"])
        assert torch.equal(drawn[clear], argmax[clear])
