from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.kv.prefix import prefix_keys

tokens = st.lists(st.integers(0, 3), max_size=40)
block_sizes = st.integers(1, 5)


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (15, 0), (16, 1), (31, 1), (48, 3)])
def test_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    keys = prefix_keys(range(num_tokens), 16)
    assert len(set(keys)) == len(keys) == num_keys
    assert all(len(key) == 16 for key in keys)


@given(tokens, tokens, tokens, block_sizes)
def test_keys_are_the_same_exactly_as_far_as_the_tokens_are(
    common: list[int], one: list[int], other: list[int], block_size: int
) -> None:
    a, b = common + one, common + other
    pairs = zip(prefix_keys(a, block_size), prefix_keys(b, block_size), strict=False)
    for i, (key_a, key_b) in enumerate(pairs):
        end = (i + 1) * block_size
        assert (key_a == key_b) is (a[:end] == b[:end])


@given(tokens, block_sizes, st.binary(max_size=4), st.data())
def test_known_keys_are_extended_to_the_same_keys(
    token_ids: list[int], block_size: int, salt: bytes, data: st.DataObject
) -> None:
    keys = prefix_keys(token_ids, block_size, salt=salt)
    num_known = data.draw(st.integers(0, len(keys)))
    assert prefix_keys(token_ids, block_size, keys[:num_known], salt) == keys


def test_the_same_tokens_after_other_tokens_have_another_key() -> None:
    keys = prefix_keys([7] * 64, 16)
    assert len(set(keys)) == 4


def test_large_token_ids_do_not_wrap() -> None:
    assert len({prefix_keys([token_id], 1) for token_id in (1, 1 + 2**8, 1 + 2**16)}) == 3
    with pytest.raises(OverflowError):
        prefix_keys([2**32 + 1], 1)


def test_another_salt_shares_no_key() -> None:
    keys = [prefix_keys(range(64), 16, salt=salt) for salt in (b"", b"a", b"b")]
    assert len({key for chain in keys for key in chain}) == 12


def test_no_salt_continues_the_chain_of_others() -> None:
    """A salt made of a key and tokens, hashed like a block, would be that block's key."""
    chain = prefix_keys([1, 2, 3, 4, 5, 6], 2)
    salt = chain[0] + array("I", [3, 4]).tobytes()
    assert prefix_keys([5, 6], 2, salt=salt)[0] not in chain


def test_more_known_keys_than_full_blocks_are_caught() -> None:
    with pytest.raises(AssertionError, match="2 keys for 1 full blocks"):
        prefix_keys([1, 2, 3], 2, known=[b"a" * 16, b"b" * 16])
