"""How long whole checkpoints take to load, what memory that takes, and that they then generate.

Each is loaded twice by real rank processes: from the checkpoint, and then from the weight cache. A
request of 64 greedy tokens runs after each load, and both must give the same ones.

    python -m benchmarks.load [--device cuda] [--tp 1] [--cache DIR] --out FILE CHECKPOINT...
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from pathlib import Path
from typing import Any

from batchtp.core import Completion, Endpoint, GenerationRequest, RequestKey, SamplingParams
from batchtp.settings import load_settings
from batchtp.worker.group import RankGroup
from batchtp.worker.messages import Ready
from batchtp.worker.supervisor import Supervisor

PROMPTS = 8
TOKENS = 64
WAIT_SECS = 300.0


def requests() -> list[GenerationRequest]:
    """Greedy ones that do not stop early."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return [
        GenerationRequest(
            key=RequestKey("load", index),
            custom_id=str(index),
            endpoint=Endpoint.COMPLETION,
            sampling=sampling,
            prompt=tuple((31 * index + 7 * t) % 200 + 100 for t in range(40)),
        )
        for index in range(PROMPTS)
    ]


def run_once(flags: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Start an engine, generate, stop; what was measured, and the tokens."""
    seen: list[Ready] = []
    start = RankGroup.start

    def listening(group: RankGroup, timeout_secs: float) -> tuple[Ready, int]:
        ready, blocks = start(group, timeout_secs)
        seen.append(ready)
        return ready, blocks

    RankGroup.start = listening  # type: ignore[method-assign]
    engine = Supervisor(load_settings(flags, environ={}))
    began = time.monotonic()
    try:
        engine.start()
        up = time.monotonic()
        answers: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        engine.submit(requests(), answers.put)
        found = {c.key.index: c for c in (answers.get(timeout=WAIT_SECS) for _ in range(PROMPTS))}
        done = time.monotonic()
    finally:
        RankGroup.start = start  # type: ignore[method-assign]
        engine.stop(0.0)
    (ready,) = seen
    record = {
        "start_secs": round(up - began, 2),
        "load_secs": round(ready.load_secs, 2),
        "weight_gib": round(ready.weight_bytes / 2**30, 3),
        "host_peak_gib": round(ready.host_peak_bytes / 2**30, 3),
        "device_peak_gib": round(ready.device_peak_bytes / 2**30, 3),
        "kv_blocks": ready.kv_blocks,
        "generate_secs": round(done - up, 2),
        "failures": [c.failure.message for c in found.values() if c.failure],
    }
    return record, [found[index].token_ids for index in range(PROMPTS)]


def main() -> int:
    """Load every checkpoint twice; 1 when the second load generates something else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cache", default="/dev/shm/batchtp-weights")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    good = True
    with arguments.out.open("w") as out:
        for checkpoint in arguments.checkpoints:
            flags = {
                "model": str(checkpoint),
                "device": arguments.device,
                "dtype": arguments.dtype,
                "tp": arguments.tp,
                "weight_cache": arguments.cache,
                "max_model_len": arguments.max_model_len,
                "home": "/tmp/batchtp-load-home",
            }
            tokens = []
            for source in ("checkpoint", "weight cache"):
                record, drawn = run_once(flags)
                tokens.append(drawn)
                line = {"checkpoint": checkpoint.name, "tp": arguments.tp, "from": source}
                out.write(json.dumps(line | record) + "\n")
                print(json.dumps(line | record), flush=True)
            good = good and tokens[0] == tokens[1] and len(tokens[0][0]) == TOKENS
            print("same tokens" if tokens[0] == tokens[1] else "OTHER TOKENS", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
