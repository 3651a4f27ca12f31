"""What the group computes in its next step. Plain Python, no clock, no I/O.

First come, first served. Running sequences go on before new ones are admitted; long prompts are cut
to what the step's token budget leaves; when the pool is empty the youngest running sequence gives
its blocks back and is computed again later. The oldest is never a victim, and every sequence fits
the pool alone, so something always moves on.

A sequence that was in two faulted steps is a suspect: it steps alone, the others holding still,
until it has passed the point where it faulted (then it is innocent) or has faulted too often.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from batchtp.worker.blocks import BlockPool
from batchtp.worker.messages import Plan, Slice
from batchtp.worker.sequence import Sequence

# A sequence in this many faulted steps runs alone until it has passed the step that faulted.
ALONE_AFTER_FAULTS = 2


class Scheduler:
    """Holds every unfinished sequence, waiting or running, and makes plans.

    `max_batched_tokens` is a step's budget. Without `chunked_prefill` a prompt is computed in one
    step, and one that is longer than what is left has no other prompt beside it.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_batched_tokens: int,
        chunked_prefill: bool,
    ) -> None:
        self.pool = pool
        self._max_sequences = max_sequences
        self._budget = max_batched_tokens
        self._chunked = chunked_prefill
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._suspects: list[Sequence] = []
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a place in the cache, oldest first."""
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence, in its place by age."""
        insort(self._waiting, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its blocks."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self.pool.give_back(sequence.forget_cache())
        else:
            self._waiting.remove(sequence)

    def restart(self, pool: BlockPool) -> None:
        """The group was replaced: nothing is in the cache, and the new cache is `pool`."""
        running, self._running, self.pool = self._running, [], pool
        for sequence in running:
            sequence.forget_cache()
        waiting, self._waiting = self._waiting, []
        for sequence in [*running, *waiting]:
            self.add(sequence)

    def accuse(self, members: Iterable[tuple[Sequence, Slice]]) -> None:
        """These were in a step that faulted, with these parts of its plan."""
        for sequence, part in members:
            sequence.faults += 1
            sequence.fault_end = part.start + len(part.token_ids)
            if sequence.faults == ALONE_AFTER_FAULTS:
                insort(self._suspects, sequence, key=_age)

    def plan(self, generation: int, step: int) -> Plan | None:
        """The next step, with blocks taken for it; None when there is nothing to do."""
        slices: dict[int, Slice] = {}
        left = self._budget
        for sequence in self._in_turn():
            if left <= 0:
                break
            # Without blocks it waits: preempted for an older one meanwhile, or not yet admitted.
            if sequence.blocks:
                left -= self._extend(sequence, left, slices)
        while left > 0 and (admitted := self._admit(left, slices)):
            left -= admitted
        if not slices:
            assert not len(self), "unfinished work but no step to make"
            self.check_integrity()
            return None
        return Plan(generation, step, tuple(slices.values()))

    def advance(self, sequence: Sequence, part: Slice) -> None:
        """Note that this part of a plan is in the cache now, and its token, if any, drawn."""
        sequence.computed += len(part.token_ids)
        if sequence.faults and sequence.computed >= sequence.fault_end:
            sequence.faults = 0
            if sequence in self._suspects:
                self._suspects.remove(sequence)

    def check_integrity(self) -> None:
        """Assert that sequences and pool agree about every block."""
        self.pool.check_integrity(block for s in self._running for block in s.blocks)

    def _in_turn(self) -> Iterable[Sequence]:
        """Running sequences that may step now: those that decode first, then by age."""
        if self._suspects:
            return self._suspects[:1]
        return sorted(self._running, key=lambda s: (s.missing > 1, s.id))

    def _extend(self, sequence: Sequence, left: int, slices: dict[int, Slice]) -> int:
        """Put the running sequence's next tokens into the step; the tokens it takes."""
        count = self._share(sequence, left)
        while not self._grow(sequence, sequence.computed + count):
            victim = next(s for s in reversed(self._running) if not self._suspected(s))
            slices.pop(victim.id, None)
            self._preempt(victim)
            if victim is sequence:
                return 0
        slices[sequence.id] = _slice(sequence, count)
        return count

    def _admit(self, left: int, slices: dict[int, Slice]) -> int:
        """Start the sequence whose turn it is, if all of it has room; the tokens it takes."""
        sequence = self._next_waiting()
        if sequence is None:
            return 0
        while self._suspected(sequence) and self._running and not self._has_place(sequence):
            self._preempt(self._running[-1])
        count = self._share(sequence, left)
        crowded = count > left and any(len(part.token_ids) > 1 for part in slices.values())
        if crowded or not self._has_place(sequence):
            return 0
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_age)
        grown = self._grow(sequence, count)
        assert grown
        slices[sequence.id] = _slice(sequence, count)
        return count

    def _next_waiting(self) -> Sequence | None:
        if self._suspects:
            first = self._suspects[0]
            return None if first in self._running else first
        return self._waiting[0] if self._waiting else None

    def _has_place(self, sequence: Sequence) -> bool:
        # Room for the token after, and for who runs already to grow: an admission that makes the
        # next steps preempt is work for nothing.
        needed = self.pool.blocks_for(sequence.length + 1) + len(self._running)
        return needed <= self.pool.free and len(self._running) < self._max_sequences

    def _suspected(self, sequence: Sequence) -> bool:
        return bool(self._suspects) and sequence is self._suspects[0]

    def _share(self, sequence: Sequence, left: int) -> int:
        return min(sequence.missing, left) if self._chunked else sequence.missing

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        blocks = self.pool.take(max(self.pool.blocks_for(tokens) - len(sequence.blocks), 0))
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._running.remove(sequence)
        self.pool.give_back(sequence.forget_cache())
        self.add(sequence)


def _age(sequence: Sequence) -> int:
    return sequence.id


def _slice(sequence: Sequence, count: int) -> Slice:
    stop = sequence.computed + count
    sampling = sequence.request.sampling
    return Slice(
        sequence_id=sequence.id,
        token_ids=sequence.tokens(sequence.computed, stop),
        start=sequence.computed,
        blocks=tuple(sequence.blocks),
        sample=stop == sequence.length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sequence.seed,
    )
