"""The same answer, whoever shares the device and whatever was lost to others meanwhile."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from pathlib import Path

import pytest

from flowprefill.request import Request
from tests.engine_harness import Harness, alone, kv_bytes, patient, running, urgent
from tests.factories import write_tiny_model
from tests.native_kernels import KERNELS, require_native

ELSEWHERE = {
    25: [
        "tests/unit/test_engine_memory.py::"
        "test_stream_evicted_at_every_stage_gives_the_answer_it_gives_alone",
        "tests/unit/test_engine_memory.py::"
        "test_mixed_load_in_half_of_max_model_len_ends_as_each_request_does_alone",
    ],
    26: [
        "tests/property/test_engine.py::test_every_request_ends_once_with_the_tokens_it_gets_alone",
        "tests/property/test_park_anywhere.py::test_smollm2_in_bf16",
    ],
}
NUM_LAYERS = 2
NUM_PROMPTS = 20
NUM_LONG = 45
ANSWER_TOKENS = 112
GROWN_TOKENS = 60 + ANSWER_TOKENS
"""Of a growing request at its end, with its prompt."""
ONE_AND_A_HALF = {"kv_cache_memory_bytes": kv_bytes(GROWN_TOKENS * 3 // 2, NUM_LAYERS)}
WHOLE_CACHE = 236
"""Prompt tokens of one that leaves no room for a growing request."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


@pytest.mark.parametrize("granularity", ["tile", "op", "layer", "chunk:32"])
def test_preempted_streams_go_on_as_if_nothing_had_happened(model: Path, granularity: str) -> None:
    """Row 25, vllm#16832: after preempt-and-recompute the output misses or doubles tokens."""
    growing = [patient(req_id, 60, max_tokens=ANSWER_TOKENS) for req_id in (1, 2)]
    expected = alone(model, *growing)
    new_id = itertools.count(10)
    with running(model, granularity=granularity, **ONE_AND_A_HALF) as h:

        def evict() -> None:
            h.submit(urgent(next(new_id), WHOLE_CACHE, max_tokens=1))

        def evict_recomputation() -> None:
            # In slices of the recomputation: at a chunk edge, or in the middle of a tile's layers.
            evict()
            h.at_token(next_evictor, 1, lambda: h.at_slice(h.device.num_slices + 2, evict))

        next_evictor = 11
        h.at_token(1, 1, evict)
        h.at_token(1, 30, evict_recomputation)
        h.submit(*growing)
        h.play()
        assert h.engine.stats().num_evictions >= 3
    for req_id in (1, 2):
        assert len(h.tokens(req_id)) == ANSWER_TOKENS
        assert h.answer(req_id) == expected[req_id]


def prompts(first_id: int) -> list[Request]:
    """The same 20 whatever the ids: of one to twelve blocks, half of them sampled."""
    requests = []
    for number in range(NUM_PROMPTS):
        request = patient(first_id + number, 5 + 9 * number, seed=number, max_tokens=12, logprobs=2)
        # A seed of its own: the engine's default is one for each id.
        sampling = dataclasses.replace(request.sampling, temperature=number % 2, seed=number)
        requests.append(dataclasses.replace(request, sampling=sampling))
    return requests


def submit_among_long_prefills(h: Harness, requests: list[Request], draw: random.Random) -> None:
    """Requests arrive while 45 unrelated long prefills do, in any order."""
    now = h.device.num_slices
    longs = [patient(1000 + i, draw.randint(200, 500), max_tokens=2) for i in range(NUM_LONG)]
    for request in [*requests, *longs]:
        h.at_slice(now + draw.randrange(400), functools.partial(h.submit, request))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("granularity", ["tile", "chunk:48"])
def test_answers_do_not_depend_on_who_shares_the_batch(
    model: Path, kernels: str, granularity: str
) -> None:
    """Row 26, vllm#5898: temperature 0 answers change with who shares the batch."""
    if kernels == "native":
        require_native("bfloat16")
    draw = random.Random(26)
    solo = [alone(model, *prompts(0), kernels=kernels) for _ in range(5)]
    assert all(again == solo[0] for again in solo)
    with running(model, kernels=kernels, granularity=granularity, max_slice_ms=0.001) as h:
        submit_among_long_prefills(h, prompts(0), draw)
        h.play()
        num_cached = h.engine.stats().num_cached_tokens
        for request in prompts(100):  # prompts seen before
            h.submit(request)
        h.play()
        assert h.engine.stats().num_cached_tokens > num_cached
    for number in range(NUM_PROMPTS):
        assert h.answer(number) == solo[0][number]
        assert h.answer(100 + number) == solo[0][number]
