"""The pool of KV-cache blocks. Plain Python: a block is a number, its memory lives in the ranks."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0..count-1, each to one owner at a time."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._free = list(range(count - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def tokens(self) -> int:
        """Tokens the whole pool can hold for one sequence."""
        return self.count * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens of one sequence take."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) when there are not so many."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks that `take` handed out."""
        for block in blocks:
            assert block in self._taken, f"block {block} was given back but nobody holds it"
            self._taken.remove(block)
            self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that exactly the `held` blocks are out, each once. Cheap; run when idle."""
        out = list(held)
        assert len(out) == len(set(out)), "a block is held by two sequences"
        assert set(out) == self._taken, "the pool and its holders disagree"
        assert len(self._free) + len(out) == self.count, "a block is lost"
