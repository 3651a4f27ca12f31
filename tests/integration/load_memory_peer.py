"""Loads one rank's shard and prints its bytes and what the process's memory rose by at most."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from batchtp.model.config import load_config
from batchtp.model.loader import load_shard
from batchtp.model.shard_file import pieces
from batchtp.model.sharding import ShardPlan


def status(field: str) -> int:
    """Bytes of a field of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main(path: Path, tp: int, rank: int) -> None:
    config = load_config(path)
    plan = ShardPlan.make(config, tp, rank)
    torch.ones(8).sum()
    # Resets the highest resident size to the present one.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    weights = load_shard(path, config, plan, torch.float16, torch.device("cpu"))
    risen = status("VmHWM") - before
    print(json.dumps({"shard": sum(t.nbytes for t in pieces(weights)), "risen": risen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
