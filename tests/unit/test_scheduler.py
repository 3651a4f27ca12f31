"""The scheduler over a simulated group: nothing lost, nothing twice, always progress."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from engine_rig import expected_ids, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtp.testing.fake_rank import next_token
from batchtp.worker.blocks import BlockPool
from batchtp.worker.messages import Plan
from batchtp.worker.scheduler import Scheduler
from batchtp.worker.sequence import Sequence

BLOCK_SIZE = 4


def make_sequence(number: int, prompt: list[int], tokens: int) -> Sequence:
    return Sequence(
        id=number,
        request=make_request(number, prompt),
        prompt_ids=tuple(prompt),
        most_tokens=tokens,
        seed=0,
        stop_ids=frozenset(),
    )


@dataclass
class Simulation:
    """A group in one process. Its cache holds what plans wrote, garbage included."""

    pool_blocks: int
    max_sequences: int = 8
    budget: int = 16
    chunked: bool = True
    done: dict[int, Sequence] = field(default_factory=dict)
    steps: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            BlockPool(self.pool_blocks, BLOCK_SIZE),
            max_sequences=self.max_sequences,
            max_batched_tokens=self.budget,
            chunked_prefill=self.chunked,
        )
        self.live: dict[int, Sequence] = {}
        self.cache: dict[int, int] = {}

    def add(self, sequence: Sequence) -> None:
        self.live[sequence.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, number: int) -> None:
        self.scheduler.remove(self.live.pop(number))

    def lose_group(self, plan: Plan) -> None:
        self.scheduler.accuse((self.live[part.sequence_id], part) for part in plan.slices)
        self.cache = {}
        self.scheduler.restart(BlockPool(self.pool_blocks, BLOCK_SIZE))

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan(1, self.steps)
        self.scheduler.check_integrity()
        if plan is not None:
            self._check(plan)
        return plan

    def _check(self, plan: Plan) -> None:
        sizes = [len(part.token_ids) for part in plan.slices]
        assert min(sizes) > 0
        assert len(plan.slices) <= self.max_sequences
        if self.chunked:
            assert sum(sizes) <= self.budget
        elif sum(sizes) > self.budget:
            assert sum(size > 1 for size in sizes) <= 1
        tables = [block for part in plan.slices for block in part.blocks]
        assert len(tables) == len(set(tables))
        for part in plan.slices:
            assert len(part.blocks) * BLOCK_SIZE >= part.start + len(part.token_ids)

    def run(self, plan: Plan) -> None:
        self.steps += 1
        for part in plan.slices:
            sequence = self.live[part.sequence_id]
            end = part.start + len(part.token_ids)
            slots = [part.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(end)]
            self.cache.update(zip(slots[part.start :], part.token_ids, strict=True))
            self.computed += len(part.token_ids)
            if part.sample:
                sequence.output_ids.append(next_token([self.cache[slot] for slot in slots], 0))
            self.scheduler.advance(sequence, part)
            if len(sequence.output_ids) == sequence.most_tokens:
                self.done[sequence.id] = self.live.pop(sequence.id)
                self.scheduler.remove(sequence)

    def finish(self, most_steps: int = 20_000) -> None:
        while (plan := self.plan()) is not None:
            self.run(plan)
            assert self.steps < most_steps, "no progress"
        assert not self.live

    def check_texts(self) -> None:
        for sequence in self.done.values():
            wanted = expected_ids(sequence.prompt_ids, sequence.most_tokens)
            assert tuple(sequence.output_ids) == wanted


# (prompt tokens, output tokens); with 10 blocks of 4 the longest fits alone.
lengths = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=10)


def prompt_of(number: int, length: int) -> list[int]:
    return [10 + (number * 31 + at) % 400 for at in range(length)]


@settings(deadline=None)
@given(
    lengths,
    st.integers(10, 40),
    st.integers(1, 30),
    st.integers(1, 10),
    st.booleans(),
    st.lists(st.sampled_from("rrrrrraafc"), max_size=60),
)
def test_every_token_comes_once_whatever_happens(
    requests: list[tuple[int, int]],
    blocks: int,
    budget: int,
    most: int,
    chunked: bool,
    events: list[str],
) -> None:
    """r: a step; a: a request arrives; f: the group faults in a step; c: one is cancelled."""
    group = Simulation(blocks, max_sequences=most, budget=budget, chunked=chunked)
    waiting = [
        make_sequence(number, prompt_of(number, prompt), output)
        for number, (prompt, output) in enumerate(requests)
    ]
    cancelled = 0
    for event in events:
        if event == "a" and waiting:
            group.add(waiting.pop(0))
        elif event == "c" and group.live:
            group.cancel(max(group.live))
            cancelled += 1
        elif (plan := group.plan()) is not None:
            if event == "f":
                group.lose_group(plan)
            else:
                group.run(plan)
    for sequence in waiting:
        group.add(sequence)
    group.finish()
    assert len(group.done) == len(requests) - cancelled
    group.check_texts()
    assert group.scheduler.pool.free == blocks


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("chunked", [True, False])
def test_chunking_changes_no_token(budget: int, chunked: bool) -> None:
    group = Simulation(64, budget=budget, chunked=chunked)
    for number in range(6):
        group.add(make_sequence(number, prompt_of(number, 5 + 3 * number), 9))
    group.finish()
    group.check_texts()


def test_a_full_pool_preempts_the_youngest_and_finishes_all() -> None:
    group = Simulation(10)
    for number in range(5):
        group.add(make_sequence(number, prompt_of(number, 8), 30))
    group.finish()
    group.check_texts()
    assert group.scheduler.preemptions > 0
    assert next(iter(group.done)) == 0


def test_preemption_does_not_thrash() -> None:
    group = Simulation(100, max_sequences=64, budget=256)
    for number in range(64):
        group.add(make_sequence(number, prompt_of(number, 24), 40))
    group.finish()
    once = sum(sequence.length - 1 for sequence in group.done.values())
    assert group.computed < 1.5 * once


def test_decode_goes_on_beside_a_long_prompt() -> None:
    group = Simulation(200, budget=8)
    group.add(make_sequence(0, prompt_of(0, 4), 30))
    group.run(group.plan() or pytest.fail("no plan"))
    group.add(make_sequence(1, prompt_of(1, 100), 2))
    for _ in range(10):
        plan = group.plan()
        assert plan is not None
        assert [(part.sequence_id, len(part.token_ids)) for part in plan.slices] == [(0, 1), (1, 7)]
        group.run(plan)


def test_first_come_is_first_served() -> None:
    group = Simulation(50, max_sequences=2)
    for number in range(6):
        group.add(make_sequence(number, prompt_of(number, 4), 5))
    group.finish()
    assert list(group.done) == sorted(group.done)


def test_after_two_faults_suspects_run_alone_until_they_are_past_it() -> None:
    group = Simulation(64)
    for number in range(3):
        group.add(make_sequence(number, prompt_of(number, 4), 6))
    for members in (3, 3):
        plan = group.plan()
        assert plan is not None
        assert len(plan.slices) == members
        group.lose_group(plan)
    for suspect in range(3):
        plan = group.plan()
        assert plan is not None
        assert [part.sequence_id for part in plan.slices] == [suspect]
        group.run(plan)
    plan = group.plan()
    assert plan is not None
    assert len(plan.slices) == 3
    group.finish()
    group.check_texts()


def test_a_long_prompt_is_innocent_once_past_the_chunk_that_faulted() -> None:
    group = Simulation(64, budget=8)
    group.add(make_sequence(0, prompt_of(0, 60), 2))
    for fault_at in (1, 3, 5):
        for step in range(fault_at + 1):
            plan = group.plan()
            assert plan is not None
            if step < fault_at:
                group.run(plan)
        group.lose_group(plan)
        assert group.live[0].faults == 1
    group.finish()
    group.check_texts()


def test_progress_between_faults_clears_the_members() -> None:
    group = Simulation(64)
    for number in range(2):
        group.add(make_sequence(number, prompt_of(number, 4), 20))
    for _ in range(6):
        for fault in (False, True):
            plan = group.plan()
            assert plan is not None
            assert len(plan.slices) == 2
            if fault:
                group.lose_group(plan)
            else:
                group.run(plan)
    group.finish()
    group.check_texts()
