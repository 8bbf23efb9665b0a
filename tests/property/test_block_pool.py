"""Any sequence of allocate, share and free keeps every block counted once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowprefill.kv.block_pool import BlockPool

NUM_BLOCKS = 12


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.holders: list[list[int]] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        num_free = self.pool.num_free
        block_ids = self.pool.allocate(num_blocks)
        assert (block_ids is None) == (num_blocks > num_free)
        if block_ids is not None:
            in_use = {block_id for held in self.holders for block_id in held}
            assert len(block_ids) == num_blocks and not in_use & set(block_ids)
            self.holders.append(block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holders))
        prefix = held[: data.draw(st.integers(0, len(held)))]
        self.pool.acquire(prefix)
        self.holders.append(prefix)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check_integrity(self.holders)
        in_use = {block_id for held in self.holders for block_id in held}
        assert self.pool.num_used == len(in_use)
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)

    def teardown(self) -> None:
        for held in self.holders:
            self.pool.free(held)
        self.pool.check_integrity([])
        assert self.pool.num_free == NUM_BLOCKS


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
