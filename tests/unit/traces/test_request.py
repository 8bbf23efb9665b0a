"""Names of prefixes, and blocks of other sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.simulator.replay import arrival_of
from flowprefill.traces.formats import prefix_names
from flowprefill.traces.request import TraceRequest
from flowprefill.workload import objective

block_ids = st.lists(st.integers(0, 3), max_size=12)


def num_equal(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


@given(block_ids, block_ids)
def test_names_are_equal_just_as_far_as_prefixes_are(a: list[int], b: list[int]) -> None:
    shared = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    names_a, names_b = prefix_names(a), prefix_names(b)
    assert names_a[:shared] == names_b[:shared]
    assert num_equal(names_a, names_b) == shared
    assert len(set(names_a)) == len(a)


@pytest.mark.parametrize("old_tokens", [16, 512])
@pytest.mark.parametrize("new_tokens", [16, 24, 32, 500, 512, 1024])
@given(
    shared=st.integers(0, 40), rest_a=st.integers(0, 40), rest_b=st.integers(0, 40),
    cut=st.integers(0, 15),
)  # fmt: skip
def test_blocks_of_another_size_share_whole_blocks_of_what_was_shared(
    old_tokens: int, new_tokens: int, shared: int, rest_a: int, rest_b: int, cut: int
) -> None:
    def request(rest: int, first: int) -> TraceRequest:
        ids = [*range(shared), *range(first, first + rest)]
        num_tokens = len(ids) * old_tokens - cut
        return TraceRequest(0.0, "text", num_tokens, 1, prefix_names(ids), old_tokens)

    if shared + min(rest_a, rest_b) == 0 or (shared and not min(rest_a, rest_b)):
        return  # a prompt that ends where the shared part does has a partial block there
    a, b = request(rest_a, 1000), request(rest_b, 2000)
    new_a, new_b = a.hashes_of_blocks(new_tokens), b.hashes_of_blocks(new_tokens)
    for whole, new in ((a, new_a), (b, new_b)):
        assert len(new) == -(-whole.input_tokens // new_tokens)
        assert len(set(new)) == len(new)
    exact = shared * old_tokens
    assert num_equal(new_a, new_b) == exact // new_tokens


def test_a_prompt_without_hashes_has_none_of_any_size() -> None:
    assert TraceRequest(0.0, "text", 100, 1).hashes_of_blocks(16) == ()


def test_the_simulator_s_keys_are_those_of_its_own_whole_blocks() -> None:
    names = prefix_names(range(100))
    a = TraceRequest(0.0, "text", 1600, 1, names, 16)
    b = TraceRequest(0.0, "text", 1600, 1, (*names[:40], *prefix_names(range(500, 560))), 16)
    keys_a, keys_b = (arrival_of(0, r, objective(r), 512).prefix_keys for r in (a, b))
    assert (len(keys_a), len(keys_b)) == (3, 3)
    assert keys_a[:1] == keys_b[:1]  # 640 tokens are shared
    assert not set(keys_a[1:]) & set(keys_b[1:])
