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


def test_blocks_freed_together_come_back_in_their_order() -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    held = pool.allocate(5)
    assert held is not None
    pool.free(held)
    assert pool.allocate(3) == held[:3] == [0, 1, 2]


def test_a_leak_is_found() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.allocate(1)
    pool.check_integrity()
    with pytest.raises(AssertionError, match="holders count"):
        pool.check_integrity([])


class TestCachedContent:
    """Blocks that keep what they hold when the last reference is dropped."""

    @staticmethod
    def cache(pool: BlockPool, keys: str) -> list[int]:
        """A request that wrote one block per key, published them and has ended."""
        block_ids = pool.allocate(len(keys))
        assert block_ids is not None
        pool.publish(block_ids, keys)
        pool.free(block_ids)
        return block_ids

    def test_published_blocks_outlive_their_request(self) -> None:
        pool = BlockPool(num_blocks=8, block_size=16)
        block_ids = self.cache(pool, "abc")
        assert (pool.num_free, pool.num_cached, pool.num_used) == (8, 3, 0)
        assert pool.match("abcd") == block_ids
        pool.check_integrity([])

    def test_match_ends_at_the_first_unknown_key(self) -> None:
        pool = BlockPool(num_blocks=8, block_size=16)
        block_ids = self.cache(pool, "abcd")
        assert pool.match("abxd") == block_ids[:2]
        assert pool.match("xbcd") == []

    def test_match_finds_blocks_in_use(self) -> None:
        pool = BlockPool(num_blocks=8, block_size=16)
        writer = pool.allocate(3)
        assert writer is not None
        assert pool.match("ab") == []
        pool.publish(writer, "ab")
        assert pool.match("abc") == writer[:2]

    def test_acquired_cached_blocks_are_used_and_not_given_away(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        shared = self.cache(pool, "ab")
        pool.acquire(shared)
        assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 2)
        own = pool.allocate(2)
        assert own is not None and not set(own) & set(shared)
        assert pool.allocate(1) is None
        pool.check_integrity([shared, own])

    def test_num_free_after_acquiring_counts_cached_blocks_out(self) -> None:
        pool = BlockPool(num_blocks=8, block_size=16)
        self.cache(pool, "abcd")
        pool.acquire(pool.match("ab"))
        matched = pool.match("abcd")
        expected = pool.num_free_after_acquiring(matched)
        assert (pool.num_free, expected) == (6, 4)
        pool.acquire(matched)
        assert pool.num_free == expected

    def test_free_blocks_are_handed_out_before_cached_ones(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        cached = self.cache(pool, "ab")
        held = pool.allocate(2)
        assert held is not None and not set(held) & set(cached)
        assert pool.num_cached == 2

    def test_too_few_blocks_forget_nothing(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        cached = self.cache(pool, "ab")
        assert pool.allocate(5) is None
        assert pool.match("ab") == cached

    def test_the_least_recently_used_prefix_is_forgotten_first(self) -> None:
        pool = BlockPool(num_blocks=3, block_size=16)
        for key in "abc":
            self.cache(pool, key)
        again = pool.match("a")
        pool.acquire(again)
        pool.free(again)
        for known in ("ca", "a", ""):
            pool.allocate(1)
            assert "".join(key for key in "bca" if pool.match(key)) == known

    def test_a_chain_loses_its_tail_before_its_head(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        block_ids = self.cache(pool, "abcd")
        for known in (3, 2, 1, 0):
            assert pool.allocate(1) == [block_ids[known]]
            assert pool.match("abcd") == block_ids[:known]

    def test_a_forgotten_block_is_free_without_content_when_its_new_owner_ends(self) -> None:
        pool = BlockPool(num_blocks=1, block_size=16)
        self.cache(pool, "a")
        held = pool.allocate(1)
        assert held is not None
        pool.free(held)
        assert (pool.num_free, pool.num_cached) == (1, 0)
        assert pool.match("a") == []

    def test_a_key_stays_with_the_block_that_had_it_first(self) -> None:
        """Two requests computed the same prompt side by side; the second went on alone."""
        pool = BlockPool(num_blocks=8, block_size=16)
        first, second = pool.allocate(2), pool.allocate(3)
        assert first is not None and second is not None
        pool.publish(first, "ab")
        pool.publish(second, "abc")
        assert pool.match("abc") == [*first, second[2]]
        pool.free(first)
        pool.free(second)
        assert pool.num_cached == 3
        pool.check_integrity([])

    def test_publishing_again_changes_nothing(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        held = pool.allocate(3)
        assert held is not None
        pool.publish(held, "ab")
        pool.publish(held, "abc")
        assert pool.match("abc") == held
        pool.check_integrity([held])

    def test_a_second_key_for_a_block_is_caught(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        held = pool.allocate(2)
        assert held is not None
        pool.publish(held, "ab")
        for keys in ("x", "b"):
            with pytest.raises(AssertionError, match="another key"):
                pool.publish(held, keys)

    def test_publishing_what_nobody_refers_to_is_caught(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        with pytest.raises(AssertionError, match="published while free"):
            pool.publish([0], "a")

    def test_freeing_a_cached_block_is_caught(self) -> None:
        pool = BlockPool(num_blocks=4, block_size=16)
        with pytest.raises(AssertionError, match="freed twice"):
            pool.free(self.cache(pool, "a"))
