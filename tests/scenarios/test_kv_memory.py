"""What can never fit, what does not fit yet, and what must be free afterwards."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import PromptTooLongError
from flowprefill.request import FinishReason
from flowprefill.scheduler.roster import MAX_SKIPS
from tests.engine_harness import Answer, alone, kv_bytes, patient, running, urgent
from tests.factories import write_tiny_model
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import SLICE_S, TOKENS_PER_S, make_arrival, make_scheduler

MAX_LEN = 4096
SMALL_LEN = 512
NUM_LAYERS = 2
BLOCK = 16
ELSEWHERE = {
    13: ["tests/unit/test_engine.py::test_request_may_fill_the_cache_and_not_exceed_it"],
    14: [
        "tests/unit/scheduler/test_starting.py::test_a_heavy_request_is_skipped_a_bounded_number_of_times",
        "tests/unit/scheduler/test_starting.py::test_light_requests_start_while_the_first_in_rank_waits_for_blocks",
    ],
    15: [
        "tests/unit/scheduler/test_prefill_order.py::test_a_request_that_ends_with_its_first_token_never_decodes",
        "tests/unit/scheduler/test_starting.py::test_a_start_reserves_the_prompt_and_the_end_returns_all_blocks",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, num_layers=NUM_LAYERS, max_len=MAX_LEN)


def test_a_prompt_larger_than_the_cache_is_refused_and_holds_nobody_up(model: Path) -> None:
    """Row 13, vllm#39734: it waits for ever at the head, and everything behind it does."""
    small: dict[str, Any] = {
        "max_model_len": SMALL_LEN,
        "kv_cache_memory_bytes": kv_bytes(SMALL_LEN // 2, NUM_LAYERS),
    }
    shorts = [urgent(i, 64) for i in range(5)]

    def run(with_large: bool) -> tuple[list[int], dict[int, Answer]]:
        """Slices before each first token; answers."""

        def submit() -> None:
            if with_large:
                large = patient(9, 3 * SMALL_LEN // 4)
                with pytest.raises(PromptTooLongError, match="256 tokens of the KV cache"):
                    h.engine.submit(large)
            h.submit(*shorts)

        with running(model, **small) as h:
            h.at_slice(1, submit)
            h.submit(patient(8, 100))
            h.play()
            assert h.engine.stats().num_started == 6
        slices = [h.first_token_slice(r.req_id) for r in shorts]
        return slices, {r.req_id: h.answer(r.req_id) for r in shorts}

    assert run(with_large=True) == run(with_large=False)


@pytest.mark.parametrize("policy", ["goodput", "s-edf", "edf", "fcfs"])
def test_lights_start_beside_a_heavy_one_that_lacks_blocks_and_starts_in_its_turn(
    policy: str,
) -> None:
    """Row 14, vllm#31731: the first waiter that cannot get blocks stops admission of lighter ones.

    50 blocks are free, the heavy one needs 63, and a light one comes each tick, 200 in all.
    """
    device = Device(make_scheduler(policy, num_blocks=100))
    device.submit(make_arrival(0, num_prompt_tokens=700, max_tokens=90, ttft_slo_s=1.0))
    device.submit(make_arrival(1, 1.0, num_prompt_tokens=1000, max_tokens=1, ttft_slo_s=9.0))
    lights = range(2, 204)
    for req_id in lights:
        arrival_s = 1.0 + 0.02 * max(0, req_id - 3)
        device.submit(
            make_arrival(req_id, arrival_s, num_prompt_tokens=10, max_tokens=1, ttft_slo_s=20.0)
        )
    device.run()
    holder_end_s, heavy_s = device.token_times[0][-1], device.token_times[1][0]
    assert device.token_times[2][0] < 1.1 and device.token_times[3][0] < 1.1
    before = [r for r in lights if device.token_times[r][0] < holder_end_s]
    assert 2 <= len(before) <= MAX_SKIPS
    # When there is room, it starts: behind the light one that runs then, and no other.
    of_heavy_s, of_light_s = 1000 / TOKENS_PER_S, 10 / TOKENS_PER_S
    assert holder_end_s < heavy_s <= holder_end_s + of_heavy_s + of_light_s + SLICE_S
    assert set(device.ended.values()) == {"finished"}


def test_requests_that_end_with_their_prefill_give_their_blocks_back(model: Path) -> None:
    """Row 15, sglang PR#10871: a request that ends in its first step leaves its blocks behind."""
    streams = [patient(i, 30 + i, max_tokens=MAX_LEN - 50) for i in range(4)]
    lengths = itertools.cycle((1, BLOCK - 1, BLOCK, BLOCK + 1))
    held: list[tuple[int, int]] = []

    def note() -> None:
        """Blocks in use, and those of the streams."""
        scheduler = h.engine._scheduler
        own = sum(len(scheduler.block_ids(stream.req_id)) for stream in streams)
        held.append((h.engine.stats().num_kv_blocks_used, own))

    with running(model) as h:
        h.submit(*streams)
        for first in range(100, 1100, 10):
            shorts = [urgent(i, next(lengths), max_tokens=1) for i in range(first, first + 10)]
            h.submit(*shorts)
            for short in shorts:
                assert h.end(short.req_id).finish_reason is FinishReason.LENGTH
        h.at_slice(h.device.num_slices + 1, note)
        for stream in streams:
            h.at_slice(h.device.num_slices + 2, lambda i=stream.req_id: h.engine.cancel(i))
        h.play()
        assert {h.end(stream.req_id).finish_reason for stream in streams} == {
            FinishReason.CANCELLED
        }, "the streams did not last"
    ((used, own),) = held
    assert used == own > 0
    num_tokens = {stream.req_id: len(h.of(stream.req_id)) - 1 for stream in streams}
    again = [patient(i, 30 + i, max_tokens=num) for i, num in num_tokens.items()]
    expected = alone(model, *again)
    for req_id in num_tokens:
        assert h.tokens(req_id)[:-1] == [token_id for token_id, *_ in expected[req_id]]
