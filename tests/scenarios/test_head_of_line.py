"""Short prompts behind long ones, and prompts back to back: who runs next, counted in slices.

A slice is the work between two boundaries; the scheduler decides at a boundary. Times of the same
rows are measured by `flowprefill bench scenarios`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flowprefill.request import Request
from tests.engine_harness import Harness, alone, patient, running, urgent
from tests.factories import write_tiny_model
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    SLICE_S,
    TOKENS_PER_S,
    FixedRatePredictor,
    make_arrival,
    make_scheduler,
)

C = 20
"""Tokens of a prompt of one tick."""
NUM_LAYERS = 2
MANY_SLICES = {"max_slice_ms": 0.001}
"""Tiles of 64 rows, attention slices of 16."""
ELSEWHERE = {
    1: [
        "tests/unit/test_engine.py::test_urgent_arrival_preempts_at_the_next_boundary",
        "tests/e2e/test_bench.py::test_hol_shows_that_an_urgent_prompt_does_not_wait",
    ],
    2: ["tests/unit/test_engine_sharing.py::test_pack_is_no_larger_than_a_chunk"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, num_layers=NUM_LAYERS, max_len=1536)


def num_slices_behind(h: Harness, *requests: Request) -> int:
    """Slices of requests that arrive together, while a prompt of one token runs before them."""
    h.submit(urgent(98, 1, max_tokens=1))
    h.play()
    of_first = h.device.num_slices
    h.at_slice(of_first, lambda: h.submit(*requests))
    h.submit(urgent(99, 1, max_tokens=1))
    h.play()
    return h.device.num_slices - 2 * of_first


@pytest.mark.parametrize("num_longs", [1, 3])
def test_shorts_pass_long_prompts_which_lose_nothing_but_the_time(
    model: Path, num_longs: int
) -> None:
    """Row 1, vllm#21495: short requests get no first token until a long prefill is done."""
    longs = [patient(i, 64 * C, max_tokens=1) for i in range(num_longs)]
    shorts = [urgent(10 + i, 64, max_tokens=1) for i in range(8)]
    with running(model, **MANY_SLICES) as h:
        of_longs = num_slices_behind(h, *longs)
    with running(model, **MANY_SLICES) as h:
        of_shorts = num_slices_behind(h, *shorts)
    with running(model, **MANY_SLICES) as h:
        h.at_slice(2, lambda: h.submit(*shorts))
        h.submit(*longs)
        h.play()
        assert set(h.first_token_order()[:8]) == {r.req_id for r in shorts}
        last = max(h.first_token_slice(r.req_id) for r in shorts)
        assert last == 2 + 1 + of_shorts
        assert h.device.num_slices == of_longs + of_shorts
        assert h.engine.stats().num_preemptions == 1
    expected = alone(model, *longs, *shorts)
    assert {req_id: h.answer(req_id) for req_id in expected} == expected


@pytest.mark.parametrize("num_longs", [1, 3])
def test_without_any_objective_named_shorts_pass_longs_that_are_too_long_to_be_on_time(
    num_longs: int,
) -> None:
    """Row 1, vllm#21495: nobody named an objective; all have the model's, here the default 1 s."""
    slo_s = 1.0
    longs, shorts, nobody = range(num_longs), range(10, 18), range(0)

    def run(longs: range, shorts: range) -> Device:
        device = Device(make_scheduler("goodput"))
        for req_id in longs:
            device.submit(make_arrival(req_id, num_prompt_tokens=1500, ttft_slo_s=slo_s))
        for req_id in shorts:
            device.submit(make_arrival(req_id, 0.02, num_prompt_tokens=64, ttft_slo_s=slo_s))
        device.run()
        return device

    device, of_shorts, of_longs = run(longs, shorts), run(nobody, shorts), run(longs, nobody)
    for req_id in shorts:
        assert device.ttft_s(req_id) <= of_shorts.ttft_s(req_id) + 3 * SLICE_S
    work_s = max(map(of_longs.ttft_s, longs)) + of_shorts.now_s
    assert max(map(device.ttft_s, longs)) <= 1.15 * work_s
    assert set(device.ended.values()) == {"finished"}


def test_slots_with_little_to_prefill_get_it_within_two_steps() -> None:
    """Row 2, llama.cpp#6607: the first big prompt fills every batch, the others wait for all of it.

    The little ones are chats, with 250 ms; the big one is a document. A step lasts until the
    scheduler next decides.
    """
    c, littles = 40, (2, 3, 4)
    predictor = FixedRatePredictor(saturation_tokens=64)
    device = Device(make_scheduler("goodput", max_num_seqs=4, predictor=predictor))
    device.submit(make_arrival(1, num_prompt_tokens=20 * c, ttft_slo_s=30.0))
    for req_id in littles:
        arrival_s = 0.01 * (req_id - 1)
        little = {"num_prompt_tokens": c // 4, "max_tokens": 1, "ttft_slo_s": 0.25}
        device.submit(make_arrival(req_id, arrival_s, **little))
    device.run()
    for req_id in littles:
        arrival_s = device.records[req_id].arrival.arrival_s
        first_s = next(ran.start_s for ran in device.log if req_id in ran.req_ids)
        steps = [ran for ran in device.log if arrival_s < ran.end_s and ran.start_s <= first_s]
        assert len(steps) <= 2
    num_tokens = 20 * c + 3 * c // 4
    assert device.token_times[1][0] == pytest.approx(num_tokens / TOKENS_PER_S)


@pytest.mark.parametrize("granularity", ["tile", "chunk:64"])
def test_prompts_back_to_back_take_no_step_more_than_their_tokens(
    model: Path, granularity: str
) -> None:
    """Row 3, sglang#22984: the rest of a long prompt takes a whole step of its own.

    Here a step has no budget of tokens to fill: it runs a prefill to its end, and the rest of a
    prompt costs a slice of so many rows, whatever follows.
    """
    c = 64
    prompts = [patient(1, 4 * c + c // 8, max_tokens=1), patient(2, 4 * c, max_tokens=1)]
    apart = 0
    for prompt in prompts:
        with running(model, granularity=granularity) as h:
            h.submit(prompt)
            h.play()
            apart += h.device.num_slices
    with running(model, granularity=granularity) as h:
        h.at_slice(0, lambda: h.submit(prompts[1]))
        h.submit(prompts[0])
        h.play()
        assert h.device.num_slices == apart
        num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        assert h.engine.stats().num_decisions <= math.ceil(num_tokens / c)
