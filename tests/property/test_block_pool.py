"""Whatever requests start, write, publish, grow and end: counts add up, and match tells the truth.

The model keeps what is written in each block and which prefixes are published, and holds the pool
to it: a matched block has that very content, and what is forgotten is what was used longest ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowprefill.kv.block_pool import BlockPool
from flowprefill.kv.prefix import prefix_keys

NUM_BLOCKS, BLOCK_SIZE = 12, 2
Tokens = tuple[int, ...]
"""All tokens up to the end of some block: what the block's K and V depend on."""


@dataclass
class Holder:
    """A request with blocks; the first `num_written` of them are full."""

    tokens: Tokens
    block_ids: list[int]
    num_written: int


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.holders: list[Holder] = []
        self.content: dict[int, Tokens] = {}  # of every block written, even if not published
        self.published: dict[Tokens, int] = {}
        self.unused: list[int] = list(range(NUM_BLOCKS))  # the block used longest ago first

    def used(self) -> set[int]:
        return {block_id for holder in self.holders for block_id in holder.block_ids}

    def cached(self) -> list[int]:
        return [b for b in self.unused if b in self.published.values()]

    def known_blocks(self, tokens: Tokens) -> list[int]:
        block_ids = []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            if tokens[:end] not in self.published:
                break
            block_ids.append(self.published[tokens[:end]])
        return block_ids

    def match(self, tokens: Tokens) -> list[int]:
        block_ids = self.pool.match(prefix_keys(tokens, BLOCK_SIZE))
        assert block_ids == self.known_blocks(tokens)
        for i, block_id in enumerate(block_ids):
            assert self.content[block_id] == tokens[: (i + 1) * BLOCK_SIZE]
        return block_ids

    def acquire(self, block_ids: list[int]) -> None:
        self.pool.acquire(block_ids)
        self.unused = [b for b in self.unused if b not in block_ids]

    def allocate(self, num_blocks: int) -> list[int] | None:
        num_free, cached = self.pool.num_free, self.cached()
        block_ids = self.pool.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > num_free)
        if block_ids is None:
            return None
        assert len(set(block_ids)) == num_blocks and set(block_ids) <= set(self.unused)
        num_forgotten = max(0, num_blocks - (num_free - len(cached)))
        assert set(block_ids) & set(cached) == set(cached[:num_forgotten])
        self.unused = [b for b in self.unused if b not in block_ids]
        self.published = {t: b for t, b in self.published.items() if b not in block_ids}
        for block_id in block_ids:
            self.content.pop(block_id, None)
        return block_ids

    def free(self, block_ids: list[int]) -> None:
        self.pool.free(block_ids)
        used = self.used()
        self.unused += [b for b in reversed(block_ids) if b not in used]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=7 * BLOCK_SIZE))
    def start(self, tokens: list[int]) -> None:
        """Share what is known and reserve the rest; if that is too much, give back the share."""
        num_blocks = self.pool.blocks_for(len(tokens))
        shared = self.match(tuple(tokens))
        num_free = self.pool.num_free_after_acquiring(shared)
        self.acquire(shared)
        assert self.pool.num_free == num_free
        own = self.allocate(num_blocks - len(shared))
        if own is None:
            self.free(shared)
        else:
            self.holders.append(Holder(tuple(tokens), shared + own, len(shared)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_blocks=st.integers(1, 7))
    def write(self, data: st.DataObject, num_blocks: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        num_full = len(holder.tokens) // BLOCK_SIZE
        for i in range(holder.num_written, min(holder.num_written + num_blocks, num_full)):
            block_id = holder.block_ids[i]
            assert self.pool.ref_count(block_id) == 1
            assert block_id not in self.published.values()
            self.content[block_id] = holder.tokens[: (i + 1) * BLOCK_SIZE]
            holder.num_written = i + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        written = holder.tokens[: holder.num_written * BLOCK_SIZE]
        self.pool.publish(holder.block_ids, prefix_keys(written, BLOCK_SIZE))
        for i in range(holder.num_written):
            self.published.setdefault(written[: (i + 1) * BLOCK_SIZE], holder.block_ids[i])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if self.pool.blocks_for(len(holder.tokens) + 1) > len(holder.block_ids):
            block_ids = self.allocate(1)
            if block_ids is None:
                return
            holder.block_ids += block_ids
        holder.tokens += (token,)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.free(holder.block_ids)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=7 * BLOCK_SIZE), at=st.integers(0, 7))
    def look_up_with_a_gap(self, tokens: list[int], at: int) -> None:
        keys = prefix_keys(tokens, BLOCK_SIZE)
        with_gap = (*keys[:at], b"nobody's", *keys[at:])
        assert self.pool.match(with_gap) == self.known_blocks(tuple(tokens))[:at]

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check_integrity([holder.block_ids for holder in self.holders])
        assert self.pool.num_used == len(self.used()) == NUM_BLOCKS - len(self.unused)
        assert self.pool.num_free == len(self.unused)
        assert self.pool.num_cached == len(self.cached())

    @invariant()
    def everything_published_is_found_while_its_prefix_is(self) -> None:
        for tokens in self.published:
            self.match(tokens)

    def teardown(self) -> None:
        while self.holders:
            self.free(self.holders.pop().block_ids)
        self.pool.check_integrity([])
        assert (self.pool.num_used, self.pool.num_free) == (0, NUM_BLOCKS)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
