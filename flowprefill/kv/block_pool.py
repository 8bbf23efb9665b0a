"""BlockPool: which KV blocks are free, what they hold, and who counts on them. No torch.

A block is `block_size` token slots, and is in one of three states:

free    nobody refers to it and its content is unknown
cached  nobody refers to it, but it still holds the content its key names; given away when the free
        blocks have run out, the least recently used first
used    requests refer to it; with a key, others may come to share it

A key names the content of a full block and of everything before it (kv/prefix.py); the pool only
compares keys. "Out of blocks" is an answer (None), not an error; a block that is freed more often
than it was handed out is a bug of ours, hence an assertion.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockPool:
    """States, reference counts and keys of block ids 0..num_blocks-1. Constant time per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        # A stack: the block freed last is handed out first, while it may still be in a cache.
        self._free = list(reversed(range(num_blocks)))
        # The least recently used first. Not a dict: taking its first item again and again is slow.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without references that hold known content."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that someone refers to."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Iterable[Hashable]) -> list[int]:
        """Blocks that hold the content of the leading keys, up to the first unknown key.

        Changes nothing: a later allocate may take the cached ones unless they are acquired first.
        """
        block_ids = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_after_acquiring(self, block_ids: Iterable[int]) -> int:
        """What num_free would be if these distinct blocks, from match(), were acquired first."""
        counts = self._ref_counts
        return self.num_free - sum(counts[block_id] == 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to used or cached blocks: a further request shares their contents."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} shared while free"
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks to be written, with one reference each; None and no change if too few.

        In ascending order: attention reads neighbouring blocks without gathering them.
        """
        assert num_blocks >= 0
        if num_blocks > self.num_free:
            return None
        num_forgotten = max(0, num_blocks - len(self._free))
        block_ids = [self._free.pop() for _ in range(num_blocks - num_forgotten)]
        block_ids += [self._forget_oldest() for _ in range(num_forgotten)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        block_ids.sort()
        return block_ids

    def _forget_oldest(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        return block_id

    def publish(self, block_ids: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Say what the first len(keys) blocks hold, so that match finds them.

        The blocks are referenced, full, and not written to again while they have a key. A key that
        another block has stays there; publishing again changes nothing.
        """
        assert len(keys) <= len(block_ids)
        for block_id, key in zip(block_ids, keys, strict=False):
            assert self._ref_counts[block_id] > 0, f"block {block_id} published while free"
            assert self._key_of.get(block_id, key) == key, f"block {block_id} has another key"
            if self._block_of.setdefault(key, block_id) == block_id:
                self._key_of[block_id] = key

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; without references it is cached if it has a key.

        block_ids: in token order. The last is dropped first and so forgotten first: a block is of
        use only while all those before it are known.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._key_of:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def ref_count(self, block_id: int) -> int:
        """References to one block; 0 = free or cached."""
        return self._ref_counts[block_id]

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError unless every block is free, cached or used, once.

        holders: the block ids of everyone who holds references. Where given, the counts must be
        exactly theirs, so a leak (a reference nobody holds) is found too; `[]` = none may be used.
        """
        unreferenced = [i for i, count in enumerate(self._ref_counts) if count == 0]
        assert all(count >= 0 for count in self._ref_counts), "a reference count is negative"
        idle = sorted([*self._free, *self._cached])
        assert idle == unreferenced, f"free and cached {idle}, but unreferenced {unreferenced}"
        assert self._cached.keys() <= self._key_of.keys(), "a cached block has no key"
        assert self._key_of.keys().isdisjoint(self._free), "a free block has a key"
        named = {block_id: key for key, block_id in self._block_of.items()}
        assert named == self._key_of, f"keys name {named}, but blocks hold {self._key_of}"
        assert len(named) == len(self._block_of), "two keys name one block"
        if holders is None:
            return
        expected = Counter(block_id for block_ids in holders for block_id in block_ids)
        actual = {i: count for i, count in enumerate(self._ref_counts) if count}
        assert actual == dict(expected), f"references {actual} but holders count {dict(expected)}"
