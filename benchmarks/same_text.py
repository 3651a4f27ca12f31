"""Run a prompts file straight through the TP group and write what came out, to compare machines.

    python benchmarks/same_text.py FILE --model M --device cuda --dtype float32 --out OUT.json
    python benchmarks/same_text.py --compare A.json B.json

No queue and no store: the supervisor and its ranks only. Every request is made greedy.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import time
from dataclasses import replace
from pathlib import Path

from batchtp.core import Completion, RequestKey
from batchtp.queue.openai import parse_line
from batchtp.settings import load_settings
from batchtp.worker.supervisor import Supervisor

DEADLINE_SECS = 900.0


def run(args: argparse.Namespace) -> dict[str, object]:
    """Generate for every line of the file; the record to write."""
    flags = {"model": args.model, "device": args.device, "dtype": args.dtype, "tp": args.tp}
    settings = load_settings({**flags, "max_sequences": args.batch})
    requests = []
    for index, raw in enumerate(Path(args.file).read_bytes().splitlines()):
        parsed = parse_line(raw, index + 1, model="any")
        request = replace(parsed.request, key=RequestKey("same-text", index))
        requests.append(replace(request, sampling=replace(request.sampling, temperature=0.0)))
    engine = Supervisor(settings)
    engine.start()
    done: queue.Queue[Completion] = queue.Queue()
    started = time.perf_counter()
    engine.submit(requests, done.put)
    completions = [done.get(timeout=DEADLINE_SECS) for _ in requests]
    seconds = time.perf_counter() - started
    info = engine.info()
    engine.stop(0.0)
    by_index = sorted(completions, key=lambda c: c.key.index)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "tp": info.tp,
        "batch": args.batch,
        "seconds": round(seconds, 3),
        "tokens": sum(len(c.token_ids) for c in completions),
        "requests": [
            {
                "custom_id": requests[c.key.index].custom_id,
                "token_ids": list(c.token_ids),
                "text": c.text,
                "failure": c.failure.code if c.failure else None,
            }
            for c in by_index
        ],
    }


def compare(first: Path, second: Path) -> int:
    """Print where two records differ; the number of requests whose tokens are not the same."""
    a, b = (json.loads(p.read_text()) for p in (first, second))
    different = 0
    for left, right in zip(a["requests"], b["requests"], strict=True):
        if left["token_ids"] != right["token_ids"]:
            different += 1
            pairs = zip(left["token_ids"], right["token_ids"], strict=False)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), "the end")
            print(f"{left['custom_id']}: differs from token {at}")
    total = len(a["requests"])
    print(
        f"{total - different} of {total} requests have the same tokens: {first.name}, {second.name}"
    )
    return different


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", default="examples/prompts.jsonl")
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("same_text.json"))
    parser.add_argument("--compare", nargs=2, type=Path)
    args = parser.parse_args()
    if args.compare:
        return 1 if compare(*args.compare) else 0
    record = run(args)
    args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False))
    print({k: v for k, v in record.items() if k != "requests"})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
