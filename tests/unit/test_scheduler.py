"""The scheduler against a model of the cache: nothing lost or doubled, always something moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtp.core import Endpoint, GenerationRequest, RequestKey, SamplingParams
from batchtp.worker.blocks import BlockPool
from batchtp.worker.messages import Plan
from batchtp.worker.scheduler import Scheduler
from batchtp.worker.sequence import Sequence, seed_of

BLOCK = 4


def sequence(number: int, prompt: int, output: int) -> Sequence:
    request = GenerationRequest(
        RequestKey("b", number), str(number), Endpoint.COMPLETION, SamplingParams(), prompt=(1,)
    )
    ids = tuple(1000 * number + at for at in range(prompt))
    return Sequence(number, request, ids, output, seed_of(request), frozenset())


class Ranks:
    """Keeps what each cache slot was given and checks what a step may read."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def run(self, plan: Plan, sequences: dict[int, Sequence]) -> list[int]:
        owners: dict[int, int] = {}
        drew = []
        for part in plan.slices:
            whole = sequences[part.sequence_id].tokens(0, sequences[part.sequence_id].length)
            stop = part.start + len(part.token_ids)
            assert part.token_ids == whole[part.start : stop]
            assert len(part.blocks) * BLOCK >= stop
            for block in part.blocks:
                assert owners.setdefault(block, part.sequence_id) == part.sequence_id
            slots = [part.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(stop)]
            self.slots.update(zip(slots[part.start :], part.token_ids, strict=True))
            assert [self.slots[slot] for slot in slots] == list(whole[:stop])
            if part.sample:
                assert stop == len(whole)
                drew.append(part.sequence_id)
        return drew


def drive(scheduler: Scheduler, sequences: dict[int, Sequence], steps: int) -> int:
    ranks = Ranks()
    for step in range(steps):
        plan = scheduler.plan(1, step)
        if plan is None:
            return step
        drew = ranks.run(plan, sequences)
        for part in plan.slices:
            owner = sequences[part.sequence_id]
            if part.sequence_id in drew:
                owner.output_ids.append(5_000_000 + 1000 * owner.id + len(owner.output_ids))
            scheduler.advance(owner, part)
            if part.sequence_id in drew and len(owner.output_ids) == owner.most_tokens:
                scheduler.remove(owner)
        scheduler.check_integrity()
    raise AssertionError("the scheduler does not come to an end")


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    spare=st.integers(0, 30),
    most=st.integers(1, 8),
    budget=st.integers(1, 64),
    chunked=st.booleans(),
)
def test_every_sequence_ends_with_every_token_once(
    lengths: list[tuple[int, int]], spare: int, most: int, budget: int, chunked: bool
) -> None:
    longest = max(-(-(p + o) // BLOCK) for p, o in lengths)
    pool = BlockPool(longest + spare, BLOCK)
    scheduler = Scheduler(
        pool, max_sequences=most, max_batched_tokens=budget, chunked_prefill=chunked
    )
    sequences = {n: sequence(n, p, o) for n, (p, o) in enumerate(lengths)}
    for item in sequences.values():
        scheduler.add(item)
    work = sum(p + o for p, o in lengths)
    drive(scheduler, sequences, steps=work * (len(lengths) + 1) * 2)
    for item in sequences.values():
        assert len(item.output_ids) == item.most_tokens
    assert pool.free == pool.count


def test_a_step_keeps_to_its_budget_and_mixes_decode_with_prefill() -> None:
    scheduler = Scheduler(
        BlockPool(100, BLOCK), max_sequences=8, max_batched_tokens=10, chunked_prefill=True
    )
    first, second = sequence(0, 3, 5), sequence(1, 30, 1)
    scheduler.add(first)
    plan = scheduler.plan(1, 0)
    assert plan is not None
    first.output_ids.append(7)
    scheduler.advance(first, plan.slices[0])
    scheduler.add(second)
    plan = scheduler.plan(1, 1)
    assert plan is not None
    assert [(part.sequence_id, len(part.token_ids)) for part in plan.slices] == [(0, 1), (1, 9)]


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = Scheduler(
        BlockPool(6, BLOCK), max_sequences=8, max_batched_tokens=64, chunked_prefill=True
    )
    sequences = {n: sequence(n, 7, 12) for n in range(2)}
    for item in sequences.values():
        scheduler.add(item)
    drive(scheduler, sequences, steps=200)
    assert scheduler.preemptions > 0
    assert [len(item.output_ids) for item in sequences.values()] == [12, 12]


def test_a_suspect_steps_alone_until_it_has_passed_the_fault() -> None:
    scheduler = Scheduler(
        BlockPool(100, BLOCK), max_sequences=8, max_batched_tokens=64, chunked_prefill=True
    )
    sequences = {n: sequence(n, 4, 6) for n in range(4)}
    for item in sequences.values():
        scheduler.add(item)
    assert scheduler.plan(1, 0) is not None
    for _ in range(2):
        scheduler.accuse([sequences[1], sequences[2]])
        scheduler.restart(BlockPool(100, BLOCK))
    alone = []
    for step in range(2):
        plan = scheduler.plan(2, step)
        assert plan is not None
        (part,) = plan.slices
        alone.append(part.sequence_id)
        sequences[part.sequence_id].output_ids.append(9)
        scheduler.advance(sequences[part.sequence_id], part)
    assert alone == [1, 2]
    plan = scheduler.plan(2, 2)
    assert plan is not None
    assert {part.sequence_id for part in plan.slices} == {0, 1, 2, 3}


def test_the_pool_refuses_what_nobody_holds() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = pool.take(2)
    assert blocks is not None
    assert pool.take(1) is None
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.give_back(blocks)
    pool.check_integrity(())
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity((0,))
