"""One rank of a real gloo group that computes checkpoint after checkpoint; rank 0 keeps the logits.

Arguments: rank, TP degree, the group's FileStore, where rank 0 writes, and a file of checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rank_driver import part
from torch import Tensor

from batchtp.model.config import load_config
from batchtp.model.decoder import Decoder
from batchtp.model.loader import load_shard
from batchtp.model.sharding import ShardPlan
from batchtp.worker.cache import make_cache
from batchtp.worker.comm import Group, join
from batchtp.worker.messages import Plan
from batchtp.worker.runner import Runner

BLOCK_SIZE, BLOCKS, CONTEXT = 16, 8, 128
CPU = torch.device("cpu")


def teacher_forced(prompt: dict[str, Any]) -> list[int]:
    """The prompt and all of its greedy continuation but the last token."""
    ids: list[int] = prompt["ids"] + prompt["greedy_ids"][:-1]
    return ids


def compute(folder: Path, group: Group) -> list[Tensor] | None:
    """Logits after every token of each prompt and its continuation: float32, on rank 0."""
    config = load_config(folder)
    plans = [ShardPlan.make(config, group.size, rank) for rank in range(group.size)]
    tensors = load_shard(folder, config, plans[group.rank], torch.float32, CPU)
    decoder = Decoder(config, plans, group.rank, tensors, group, max_model_len=CONTEXT)
    runner = Runner(decoder, make_cache(decoder, BLOCKS, BLOCK_SIZE), BLOCK_SIZE)
    found = []
    for prompt in json.loads((folder / "expected.json").read_text())["prompts"]:
        slices = (part(0, teacher_forced(prompt), 0, range(BLOCKS)),)
        found.append(runner.logits(Plan(1, 1, slices), everywhere=True))
    return None if found[0] is None else [logits for logits in found if logits is not None]


def main(rank: int, tp: int, store: str, output: Path, names: Path) -> None:
    torch.set_num_threads(1)
    group = join(rank, tp, CPU, store, timeout_secs=120)
    kept = {}
    for name in json.loads(names.read_text()):
        kept[name] = compute(Path(name), group)
    if rank == 0:
        torch.save(kept, output)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
    # As ranks do: the transport's threads may still run, and the interpreter's end aborts on them.
    os._exit(0)
