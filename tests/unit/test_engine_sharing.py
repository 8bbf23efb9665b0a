"""What requests share changes no bit of their answers: a packed pass, the KV of equal prefixes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from flowprefill.request import FinishReason, Request
from tests.engine_harness import (
    Answer,
    Harness,
    alone,
    kv_bytes,
    patient,
    running,
    urgent,
    with_slo,
)
from tests.factories import write_tiny_model

MAX_LEN = 512
NUM_LAYERS = 2
BLOCK = 16
MANY_SLICES = {"max_slice_ms": 0.001}
"""Tiles of 64 rows, attention slices of 16."""
PREFILL_SLICES, STEP_SLICES = 5, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


# ---- packed prefills ----------------------------------------------------------------------------

PACK = [urgent(2, 1), urgent(3, 5, temperature=1.5), urgent(4, 20, logprobs=2), urgent(5, 30)]
PACK_SLICES = PREFILL_SLICES + 3  # each has an attention slice of its own, in the first layer


@functools.cache
def answers_alone(model: Path) -> dict[int, Any]:
    return alone(model, patient(1), *PACK, patient(9, 200))


@pytest.mark.parametrize("granularity", ["whole", "chunk:64", "layer", "op", "tile"])
def test_short_prompts_are_one_pass_with_the_answers_of_each_alone(
    model: Path, granularity: str
) -> None:
    with running(model, granularity=granularity) as h:
        h.at_slice(1, lambda: h.submit(*PACK))
        h.submit(patient(1))
        h.play()
        assert len({h.first_token_slice(r.req_id) for r in PACK}) == 1
        stats = h.engine.stats()
        assert stats.num_preemptions == (0 if granularity == "whole" else 1)
    for req_id in (1, 2, 3, 4, 5):
        assert h.answer(req_id) == answers_alone(model)[req_id]


def test_pack_is_no_larger_than_a_chunk(model: Path) -> None:
    with running(model, granularity="chunk:32") as h:
        h.at_slice(1, lambda: h.submit(*PACK))
        h.submit(patient(1))
        h.play()
        first_slices = [h.first_token_slice(r.req_id) for r in PACK]
        assert first_slices[0] == first_slices[1] == first_slices[2] < first_slices[3]
    for request in PACK:
        assert h.answer(request.req_id) == answers_alone(model)[request.req_id]


def submit_pack(h: Harness, at_slice: int) -> int:
    """Let the pack take the device from a long prefill. Returns its first slice."""
    h.at_slice(at_slice, lambda: h.submit(*PACK))
    return at_slice + 1


def test_member_cancelled_while_the_pack_runs_leaves_the_others_their_pass(model: Path) -> None:
    with running(model) as h:
        start = submit_pack(h, 1)
        h.at_slice(start + 3, lambda: h.engine.cancel(4))
        h.submit(patient(1))
        h.play()
        for req_id in (2, 3, 5):  # nothing ran twice
            assert h.first_token_slice(req_id) == start + PACK_SLICES
    check_without(h, model, cancelled={4})


@pytest.mark.parametrize("cancelled", [{2}, {3, 5}, {2, 3, 4}])
def test_members_cancelled_while_the_pack_is_parked(model: Path, cancelled: set[int]) -> None:
    """The first member, whose place the pack has in the order, too."""
    top = with_slo(patient(9, 200), rank=1)
    with running(model) as h:
        start = submit_pack(h, 1)
        h.at_slice(start + 2, lambda: h.submit(top))
        h.at_token(9, 1, lambda: [h.engine.cancel(req_id) for req_id in cancelled])
        h.submit(patient(1))
        h.play()
        assert h.engine.stats().num_preemptions == 2
        for req_id in {2, 3, 4, 5} - cancelled:
            assert h.of(req_id)[-1].num_preemptions == 1
            assert h.first_token_slice(req_id) == start + PREFILL_SLICES + PACK_SLICES
    check_without(h, model, cancelled)
    assert h.answer(9) == answers_alone(model)[9]


@pytest.mark.parametrize("is_parked", [False, True])
def test_pack_whose_members_are_all_cancelled_ends_at_the_next_boundary(
    model: Path, is_parked: bool
) -> None:
    def cancel_all() -> None:
        if is_parked:
            h.submit(with_slo(patient(9, 200), rank=1))
        for request in PACK:
            h.engine.cancel(request.req_id)

    with running(model) as h:
        start = submit_pack(h, 1)
        h.at_slice(start + 3, cancel_all)
        h.submit(patient(1))
        h.play()
        left = PREFILL_SLICES - 2  # of the long one
        others = PREFILL_SLICES if is_parked else 0
        assert h.first_token_slice(1) == start + 4 + others + left
    check_without(h, model, {2, 3, 4, 5})


def test_evicted_pack_starts_again_with_all_members(model: Path) -> None:
    """Also the blocks of one that was cancelled before come back."""
    pack = [urgent(i, 40) for i in (2, 3, 4)]
    huge = with_slo(patient(9, 200), rank=1)
    expected = alone(model, *pack)
    with running(model, kv_cache_memory_bytes=kv_bytes(256, NUM_LAYERS)) as h:
        h.at_slice(0, lambda: h.submit(*pack))
        h.at_slice(PREFILL_SLICES + 1, lambda: h.engine.cancel(3))
        h.at_slice(PREFILL_SLICES + 3, lambda: h.submit(huge))
        h.submit(urgent(1, 20, max_tokens=1))
        h.play()
        assert h.engine.stats().num_evictions == 2
    for req_id in (2, 4):
        assert h.answer(req_id) == expected[req_id]


def check_without(h: Harness, model: Path, cancelled: set[int]) -> None:
    for req_id in (1, 2, 3, 4, 5):
        if req_id in cancelled:
            assert [o.finish_reason for o in h.of(req_id)] == [FinishReason.CANCELLED]
        else:
            assert h.answer(req_id) == answers_alone(model)[req_id]


# ---- shared prefixes ----------------------------------------------------------------------------


def submit_and_end(h: Harness, request: Request) -> tuple[int, int]:
    """Run one request alone. Returns the slices it took and the prompt tokens found cached."""
    slices, cached = h.device.num_slices, h.engine.stats().num_cached_tokens
    h.submit(request)
    h.end(request.req_id)
    return h.device.num_slices - slices, h.engine.stats().num_cached_tokens - cached


def again(request: Request, req_id: int, more: list[int] = []) -> Request:  # noqa: B006
    """The same prompt, and `more` behind it."""
    return dataclasses.replace(
        request, req_id=req_id, prompt_token_ids=[*request.prompt_token_ids, *more]
    )


@pytest.mark.parametrize("length", [n * BLOCK + d for n in (1, 5, 9) for d in (-1, 0, 1)])
def test_warm_prompt_gives_the_cold_answer_for_less_work(model: Path, length: int) -> None:
    """All full blocks are found but that of the last token, which is always computed."""
    cold = patient(1, length, max_tokens=8, logprobs=2)
    with running(model, **MANY_SLICES) as h:
        cold_slices, cold_cached = submit_and_end(h, cold)
        warm_slices, warm_cached = submit_and_end(h, again(cold, 2))
        stats = h.engine.stats()
        assert (cold_cached, warm_cached) == (0, (length - 1) // BLOCK * BLOCK)
        assert stats.num_prefill_tokens == 2 * length
        assert warm_slices < cold_slices if length > 2 * 64 else warm_slices <= cold_slices
    assert h.answer(2) == h.answer(1)


FIRST_TURNS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.5, "seed": 1, "repetition_penalty": 1.2},
}


def second_turn(first: Answer, sampling: str) -> Request:
    """The first turn's prompt and answer, and something more."""
    answer = [token for token, *_ in first if token is not None]
    request = patient(1, 68, max_tokens=60, **FIRST_TURNS[sampling])
    return again(request, 2, more=[*answer, 1, 2, 3])


@functools.cache
def turns_alone(model: Path, sampling: str) -> tuple[Answer, Answer]:
    first = alone(model, patient(1, 68, max_tokens=60, **FIRST_TURNS[sampling]))[1]
    return first, alone(model, second_turn(first, sampling))[2]


@pytest.mark.parametrize(
    ("granularity", "sampling"),
    [*((g, "greedy") for g in ("whole", "chunk:40", "layer", "op", "tile")), ("tile", "seeded")],
)
def test_second_turn_finds_prompt_and_answer_of_the_first(
    model: Path, granularity: str, sampling: str
) -> None:
    with running(model, granularity=granularity, **MANY_SLICES) as h:
        submit_and_end(h, patient(1, 68, max_tokens=60, **FIRST_TURNS[sampling]))
        _, cached = submit_and_end(h, second_turn(h.answer(1), sampling))
        # 128 tokens, but K and V of the answer's last one were never written
        assert cached == 7 * BLOCK
    assert (h.answer(1), h.answer(2)) == turns_alone(model, sampling)


def test_prompts_that_differ_in_one_token_share_only_what_is_before_it(model: Path) -> None:
    first = patient(1, 200)
    positions = {2: 0, 3: 15, 4: 16, 5: 100, 6: 191, 7: 199}
    others = [again(first, req_id) for req_id in positions]
    for other in others:
        other.prompt_token_ids[positions[other.req_id]] ^= 1
    with running(model, **MANY_SLICES) as h:
        submit_and_end(h, first)
        for other in others:
            _, cached = submit_and_end(h, other)
            assert cached == positions[other.req_id] // BLOCK * BLOCK
    expected = alone(model, *others)
    for other in others:
        assert h.answer(other.req_id) == expected[other.req_id]


def test_prefix_is_shared_while_its_first_owner_decodes(model: Path) -> None:
    owner = patient(1, 100, max_tokens=40)
    sharers = [again(owner, i, more=[i] * 20) for i in (2, 3)]
    expected = alone(model, owner, *sharers)
    with running(model) as h:
        h.at_token(1, 5, lambda: h.submit(*sharers))
        h.at_token(2, 3, lambda: h.engine.cancel(1))  # its blocks stay theirs
        h.submit(owner)
        h.play()
        assert h.engine.stats().num_cached_tokens == 2 * 96
        assert h.of(1)[-1].finish_reason is FinishReason.CANCELLED
    for req_id in (2, 3):
        assert h.answer(req_id) == expected[req_id]


def test_members_of_a_pack_share_what_was_cached_before(model: Path) -> None:
    owner = patient(1, 100)
    pack = [again(owner, i, more=[i] * (10 * i)) for i in (2, 3)]
    expected = alone(model, *pack)
    with running(model) as h:
        submit_and_end(h, owner)
        before = h.device.num_slices
        h.at_slice(before + 1, lambda: h.submit(*pack))
        h.submit(patient(9))
        h.play()
        assert len({h.first_token_slice(i) for i in (2, 3)}) == 1
        assert h.engine.stats().num_cached_tokens == 2 * 96
    for req_id in (2, 3):
        assert h.answer(req_id) == expected[req_id]


def test_warm_answer_is_the_cold_one_after_an_eviction(model: Path) -> None:
    stream = patient(1, 100, max_tokens=60)
    expected = alone(model, stream)[1]
    with running(model, kv_cache_memory_bytes=kv_bytes(256, NUM_LAYERS)) as h:
        h.at_token(1, 30, lambda: h.submit(urgent(2, 130)))  # takes some of its blocks
        h.submit(stream)
        h.play()
        assert h.engine.stats().num_evictions == 1
        _, cached = submit_and_end(h, again(stream, 3))
        assert cached == 96
    assert h.answer(1) == h.answer(3) == expected


def test_without_prefix_caching_nothing_is_kept(model: Path) -> None:
    with running(model, enable_prefix_caching=False, **MANY_SLICES) as h:
        cold = patient(1, 200)
        slices = [submit_and_end(h, again(cold, i))[0] for i in (1, 2)]
        assert slices[0] == slices[1]
        stats = h.engine.stats()
        assert stats.num_cached_tokens == stats.num_kv_blocks_cached == 0
    assert h.answer(1) == h.answer(2)


def test_cached_blocks_give_way_to_new_prompts(model: Path) -> None:
    """The least recently used first; what is left of a prefix is still found."""
    old, new = patient(1, 150), patient(2, 150)
    with running(model, kv_cache_memory_bytes=kv_bytes(256, NUM_LAYERS)) as h:
        submit_and_end(h, old)
        submit_and_end(h, new)
        assert h.engine.stats().num_evictions == 0
        _, cached_of_new = submit_and_end(h, again(new, 3))
        _, cached_of_old = submit_and_end(h, again(old, 4))
        assert cached_of_new == 144
        assert 0 < cached_of_old < 144
    assert h.answer(3) == h.answer(2)
    assert h.answer(4) == h.answer(1)
