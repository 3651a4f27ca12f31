"""The block pool never loses a block and never gives one to two owners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtp.worker.blocks import BlockPool


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_every_block_is_free_or_held_once(count: int, moves: list[tuple[bool, int]]) -> None:
    pool = BlockPool(count, 4)
    held: list[list[int]] = []
    for is_take, number in moves:
        before = pool.free
        if is_take:
            blocks = pool.take(number)
            if blocks is None:
                assert number > before == pool.free
            else:
                assert len(blocks) == number == before - pool.free
                held.append(blocks)
        elif held:
            pool.give_back(held.pop(number % len(held)))
        pool.check_integrity(block for blocks in held for block in blocks)
    for blocks in held:
        pool.give_back(blocks)
    assert pool.take(count) is not None


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(9, 4).blocks_for(tokens) == blocks


def test_a_block_given_back_twice_is_a_bug() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.give_back(blocks)


def test_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(2, 4)
    pool.take(1)
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity([])
