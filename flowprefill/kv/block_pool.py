"""BlockPool: which KV blocks are free and who counts on the others. Ids and counts only, no torch.

A block is `block_size` token slots. "Out of blocks" is an answer (None), not an error; a block that
is freed more often than it was handed out is a bug of ours, hence an assertion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Free list and reference counts over block ids 0..num_blocks-1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # A stack: the block freed last is handed out first, while it may still be in a cache.
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out `num_blocks` blocks with one reference each, or None and no change."""
        assert num_blocks >= 0
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks in use: a further request shares their contents."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} shared while free"
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block; a block without references is free."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def ref_count(self, block_id: int) -> int:
        """References to one block; 0 = free."""
        return self._ref_counts[block_id]

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError unless every block is either free, once, or referenced.

        holders: the block ids of everyone who holds references. Where given, the counts must be
        exactly theirs, so a leak (a reference nobody holds) is found too; `[]` = all must be free.
        """
        unreferenced = {i for i, count in enumerate(self._ref_counts) if count == 0}
        assert len(self._free) == len(set(self._free)), "a block is twice in the free list"
        assert set(self._free) == unreferenced, "free list and reference counts disagree"
        assert all(count >= 0 for count in self._ref_counts), "a reference count is negative"
        if holders is None:
            return
        expected = Counter(block_id for block_ids in holders for block_id in block_ids)
        actual = {i: count for i, count in enumerate(self._ref_counts) if count}
        assert actual == dict(expected), f"references {actual} but holders count {dict(expected)}"
