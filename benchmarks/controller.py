"""What the supervisor's side of a step costs, without any model: CPU µs a decode step, the median.

    python benchmarks/controller.py [--context 512] [--tp 1 4]

Plan, encode it once, encode and decode every rank's answer, apply the tokens.
Random prompts and tokens; stop strings and detokenisation are not in it.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from batchtp.core import Endpoint, GenerationRequest, RequestKey, SamplingParams
from batchtp.worker.blocks import BlockPool
from batchtp.worker.messages import FrameBuffer, Plan, StepResult, encode
from batchtp.worker.scheduler import Scheduler
from batchtp.worker.sequence import Sequence

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
RUNNING = (16, 64, 256)
STEPS = 100


def make_sequences(count: int, context: int) -> dict[int, Sequence]:
    """Sequences that never end, with prompts of about `context` tokens."""
    found = {}
    for number in range(count):
        prompt = tuple(random.choices(range(VOCAB_SIZE), k=context + random.randrange(BLOCK_SIZE)))
        request = GenerationRequest(
            RequestKey("benchmark", number), "", Endpoint.COMPLETION, SamplingParams(), prompt
        )
        found[number] = Sequence(number, request, prompt, 10**9, number, frozenset())
    return found


def answer(plan: Plan, rank: int) -> StepResult:
    """What a rank would send back; tokens from rank 0."""
    drawn = [(part.sequence_id, random.randrange(VOCAB_SIZE)) for part in plan.slices]
    return StepResult(rank, plan.generation, plan.step, tuple(drawn if rank == 0 else ()), (), 0.0)


def measure(running: int, context: int, tp: int) -> tuple[float, float, int]:
    """(µs to plan and apply, µs to encode and decode, bytes of a plan), each a step."""
    sequences = make_sequences(running, context)
    blocks = running * (context + STEPS + 4 * BLOCK_SIZE) // BLOCK_SIZE + running
    scheduler = Scheduler(
        BlockPool(blocks, BLOCK_SIZE),
        max_sequences=running,
        max_batched_tokens=running * (context + BLOCK_SIZE),
        chunked_prefill=True,
    )
    for sequence in sequences.values():
        scheduler.add(sequence)
    planning: list[float] = []
    talking: list[float] = []
    size = 0
    for step in range(STEPS + 1):
        began = time.thread_time()
        plan = scheduler.plan(1, step)
        planned = time.thread_time()
        assert plan is not None
        frame = encode(plan)
        results = []
        for rank in range(tp):
            results += FrameBuffer().feed(encode(answer(plan, rank)))
        talked = time.thread_time()
        result = results[0]
        assert isinstance(result, StepResult)
        tokens = dict(result.tokens)
        for part in plan.slices:
            sequences[part.sequence_id].output_ids.append(tokens[part.sequence_id])
            scheduler.advance(sequences[part.sequence_id], part)
        applied = time.thread_time()
        # The first step is the prompts.
        if step:
            planning.append(planned - began + applied - talked)
            talking.append(talked - planned)
            size = len(frame)
    return median(planning) * 1e6, median(talking) * 1e6, size


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 4])
    args = parser.parse_args()
    random.seed(1)
    print("running  tp  plan+apply µs  messages µs  plan bytes")
    for tp in args.tp:
        for running in RUNNING:
            planning, talking, size = measure(running, args.context, tp)
            print(f"{running:7}  {tp:2}  {planning:13.0f}  {talking:11.0f}  {size:10}")


if __name__ == "__main__":
    main()
