"""The token state of one request: the one place where it lives, where no GPU can be lost."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from batchtp.core import GenerationRequest, RequestKey


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. Ranks hold its keys and values only, and those can be made again.

    `computed` counts tokens whose keys and values are in the cache. `most_tokens` is the output
    limit after the context clamped it. `faults` counts faulted steps it was in, and `fault_end`
    is how far the last of them would have come: what gets there is innocent.
    """

    id: int
    request: GenerationRequest
    prompt_ids: tuple[int, ...]
    most_tokens: int
    seed: int
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    faults: int = 0
    fault_end: int = 0

    @property
    def key(self) -> RequestKey:
        """The request's name."""
        return self.request.key

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def missing(self) -> int:
        """Tokens still to compute before the next one can be drawn. At least 1 while it runs."""
        return self.length - self.computed

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids at positions start..stop."""
        split = len(self.prompt_ids)
        if start >= split:
            return tuple(self.output_ids[start - split : stop - split])
        head = self.prompt_ids[start:stop]
        return head + tuple(self.output_ids[: max(stop - split, 0)])

    def forget_cache(self) -> list[int]:
        """Nothing of it is in the cache any more; gives the blocks it held."""
        blocks, self.blocks, self.computed = self.blocks, [], 0
        return blocks


def seed_of(request: GenerationRequest) -> int:
    """The request's seed; without one, a stable one from its name, so that a restart repeats it."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    name = f"{request.key.batch_id}/{request.key.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
