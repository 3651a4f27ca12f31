"""One rank's engine: a Plan in, a step of the decoder, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchtp.model.decoder import Decoder
from batchtp.model.layers import LayerCache, StepInput
from batchtp.worker.messages import Plan, Slice
from batchtp.worker.sampler import Draw, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's outcome: (sequence id, token) pairs, and the sequences whose logits were bad."""

    tokens: tuple[tuple[int, int], ...] = ()
    bad: tuple[int, ...] = ()


class Runner:
    """Runs plans over one KV cache. Every rank runs the same plans in the same order."""

    def __init__(self, decoder: Decoder, cache: Sequence[LayerCache], block_size: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._block_size = block_size

    @torch.inference_mode()
    def step(self, plan: Plan) -> Drawn:
        """Compute the plan's tokens and draw where it says so (on rank 0; elsewhere nothing)."""
        logits = self.logits(plan)
        if logits is None:
            return Drawn()
        wanted = [part for part in plan.slices if part.sample]
        drawn = sample(logits, [_draw(part) for part in wanted])
        named = [(part.sequence_id, token) for part, token in zip(wanted, drawn, strict=True)]
        return Drawn(
            tokens=tuple((sequence, token) for sequence, token in named if token is not None),
            bad=tuple(sequence for sequence, token in named if token is None),
        )

    @torch.inference_mode()
    def logits(self, plan: Plan, everywhere: bool = False) -> Tensor | None:
        """Logits after the last token of each sampling slice, or after every token: float32
        [R, vocabulary] on rank 0, else None.
        """
        if not plan.slices:
            return None
        step = step_input(plan.slices, self._block_size, self._decoder.device)
        if everywhere:
            step = replace(
                step, sample_rows=torch.arange(len(step.tokens), device=step.tokens.device)
            )
        return self._decoder.forward(step, self._cache)


def step_input(slices: Sequence[Slice], block_size: int, device: torch.device) -> StepInput:
    """The tensors of a step, on `device`."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts: list[int] = []
    samples: list[int] = []
    width = max(len(part.blocks) for part in slices)
    for part in slices:
        span = range(part.start, part.start + len(part.token_ids))
        tokens += part.token_ids
        positions += span
        slots += (part.blocks[at // block_size] * block_size + at % block_size for at in span)
        starts.append(len(tokens))
        contexts.append(span.stop)
        if part.sample:
            samples.append(len(tokens) - 1)
    tables = [part.blocks + (0,) * (width - len(part.blocks)) for part in slices]
    return StepInput(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        sample_rows=torch.tensor(samples, dtype=torch.int64, device=device),
    )


def _draw(part: Slice) -> Draw:
    return Draw(
        temperature=part.temperature,
        top_p=part.top_p,
        top_k=part.top_k,
        seed=part.seed,
        position=part.start + len(part.token_ids),
    )
