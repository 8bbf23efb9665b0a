from __future__ import annotations

import pytest

from flowprefill.kv.block_pool import BlockPool


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    first, second = pool.allocate(3), pool.allocate(5)
    assert first is not None and second is not None
    assert sorted(first + second) == list(range(8))
    assert (pool.num_free, pool.num_used) == (0, 8)


def test_out_of_blocks_is_an_answer_and_changes_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity([held or []])


def test_allocating_nothing_gives_no_blocks() -> None:
    assert BlockPool(num_blocks=1, block_size=16).allocate(0) == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(num_blocks=4, block_size=16).blocks_for(num_tokens) == num_blocks


def test_freed_blocks_can_be_allocated_again() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    held = pool.allocate(2)
    assert held is not None
    pool.free(held)
    assert sorted(pool.allocate(2) or []) == sorted(held)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    held = pool.allocate(1)
    assert held is not None
    pool.acquire(held)
    assert pool.ref_count(held[0]) == 2
    pool.check_integrity([held, held])
    pool.free(held)
    assert pool.num_used == 1
    pool.free(held)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    held = pool.allocate(1)
    assert held is not None
    pool.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(held)


def test_sharing_a_free_block_is_caught() -> None:
    with pytest.raises(AssertionError, match="shared while free"):
        BlockPool(num_blocks=2, block_size=16).acquire([0])


def test_a_leak_is_found() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.allocate(1)
    pool.check_integrity()
    with pytest.raises(AssertionError, match="holders count"):
        pool.check_integrity([])
