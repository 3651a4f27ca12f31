"""One decoder layer of each reported model at its true shape: TP 2, 4 and 8 against TP 1.

Random int4 AWQ weights, real shards, real layers; ranks are threads, so that one device is enough,
and their partial sums are added in rank order in float32. A prompt of 17 tokens, then a decode step
of three sequences. In float32 the outputs must agree to 1e-5 of their size. In 16 bits every degree
must be as near to float32 as TP 1 is, within half as much again.

    python -m benchmarks.true_shapes [--device cuda --dtype float16] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from batchtp.testing.random_awq import TRUE_SHAPES, Shape, write_random_awq
from batchtp.testing.thread_group import ThreadedRunners
from batchtp.worker.messages import Slice

DEGREES = (2, 4, 8)
PROMPT = 17
FLOAT32_TOLERANCE = 1e-5
ROUNDING_SLACK = 1.5


def part(sequence: int, tokens: range, start: int) -> Slice:
    """Some tokens of a sequence, which has four blocks of the cache."""
    return Slice(
        sequence_id=sequence,
        token_ids=tuple((7 * t + 3 * sequence) % 1024 for t in tokens),
        start=start,
        blocks=tuple(range(4 * sequence, 4 * sequence + 4)),
        sample=True,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
    )


@torch.inference_mode()
def outputs(folder: Path, tp: int, device: str, dtype: torch.dtype) -> Tensor:
    """Logits after every token of a prefill and of a decode step."""
    group = ThreadedRunners(folder, tp, dtype=dtype, device=device)
    prefill = group.logits(tuple(part(s, range(PROMPT), 0) for s in range(3)), everywhere=True)
    decode = group.logits(tuple(part(s, range(PROMPT, PROMPT + 1), PROMPT) for s in range(3)))
    return torch.cat((prefill, decode)).cpu()


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, in units of the output's root mean square."""
    return float((got - wanted).abs().max() / wanted.square().mean().sqrt())


def check(name: str, shape: Shape, device: str, dtype_name: str) -> dict[str, object]:
    """Compare the degrees on one model; the record of it."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_random_awq(folder, shape, device=device)
        started = time.monotonic()
        exact = outputs(folder, 1, device, torch.float32)
        own = outputs(folder, 1, device, dtype) if dtype is not torch.float32 else exact
        allowed = FLOAT32_TOLERANCE
        if dtype is not torch.float32:
            allowed = ROUNDING_SLACK * distance(own, exact)
        found = {tp: distance(outputs(folder, tp, device, dtype), exact) for tp in DEGREES}
        return {
            "model": name,
            "dtype": dtype_name,
            "down_proj_groups": shape.intermediate / 128,
            "tp1_from_float32": distance(own, exact),
            "from_float32": found,
            "allowed": allowed,
            "ok": all(value <= allowed for value in found.values())
            and bool(exact.isfinite().all()),
            "seconds": round(time.monotonic() - started, 2),
        }


def main() -> int:
    """Check every model; 1 when one of them is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", default=",".join(TRUE_SHAPES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    records = []
    for name in arguments.models.split(","):
        records.append(check(name, TRUE_SHAPES[name], arguments.device, arguments.dtype))
        print(json.dumps(records[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
