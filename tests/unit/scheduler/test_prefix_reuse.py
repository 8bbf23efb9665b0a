"""What a prompt finds cached of its beginning, and what it leaves for others."""

from __future__ import annotations

import pytest

from flowprefill.scheduler.events import Cancel, Finished, PrefillParked
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    document_keys,
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
    run_whole,
)

KEYS = document_keys("d", 160)


def test_the_second_prompt_with_the_same_beginning_computes_only_the_rest() -> None:
    device = Device(make_scheduler())
    for req_id, arrival_s in ((0, 0.0), (1, 5.0)):
        arrival = make_arrival(
            req_id,
            arrival_s,
            num_prompt_tokens=4100,
            max_tokens=40,
            prefix_keys=document_keys("shared", 4000),
        )
        device.submit(arrival)
    device.run()
    assert [len(device.token_times[r]) for r in range(2)] == [40, 40]
    assert [device.records[r].num_cached_tokens for r in range(2)] == [0, 4000]
    assert device.ttft_s(0) == pytest.approx(4.1)
    assert device.ttft_s(1) == pytest.approx(0.1)


def test_prompts_share_up_to_where_they_differ() -> None:
    scheduler = make_scheduler()
    run_whole(scheduler, make_arrival(0, num_prompt_tokens=160, max_tokens=1, prefix_keys=KEYS))
    other = (*KEYS[:3], *document_keys("other", 160)[3:])
    run_prefill(scheduler, make_arrival(1, num_prompt_tokens=160, prefix_keys=other))
    assert scheduler.num_cached_tokens(1) == 48


def test_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    run_whole(scheduler, make_arrival(0, num_prompt_tokens=160, max_tokens=1, prefix_keys=KEYS))
    run_prefill(scheduler, make_arrival(1, num_prompt_tokens=160, prefix_keys=KEYS))
    assert scheduler.num_cached_tokens(1) == 144


def test_blocks_are_shared_with_one_that_still_decodes() -> None:
    scheduler = make_scheduler()
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=170, prefix_keys=KEYS))
    run_prefill(scheduler, make_arrival(1, num_prompt_tokens=170, prefix_keys=KEYS))
    assert scheduler.block_ids(0)[:10] == scheduler.block_ids(1)[:10]
    assert scheduler.block_ids(0)[10] != scheduler.block_ids(1)[10]
    scheduler.decide(1.0, [Finished(0)])
    assert pool_of(scheduler).ref_count(scheduler.block_ids(1)[0]) == 1


def test_nothing_is_published_before_the_prefill_is_done() -> None:
    scheduler = make_scheduler("edf")
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, prefix_keys=KEYS[:6])]))
    urgent = make_arrival(1, 0.05, ttft_slo_s=1, prefix_keys=KEYS[:6])
    parked = PrefillParked(task.task_id, 0.05)
    assert prefill_of(scheduler.decide(0.05, [parked, urgent])).req_ids == (1,)
    assert scheduler.num_cached_tokens(1) == 0
    scheduler.decide(0.06, [Cancel(0), Cancel(1)])
    assert pool_of(scheduler).num_cached == 0


def test_a_prompt_that_waits_finds_what_was_published_meanwhile() -> None:
    device = Device(make_scheduler("fcfs"))
    for req_id in range(2):
        device.submit(make_arrival(req_id, num_prompt_tokens=170, max_tokens=1, prefix_keys=KEYS))
    device.run()
    assert device.ttft_s(1) == pytest.approx(0.18)


def test_keys_given_at_the_end_let_the_next_turn_find_the_answer_too() -> None:
    device = Device(make_scheduler())
    # 160 + 40 tokens, of which the last one was never written: 12 full blocks.
    device.submit(make_arrival(0, num_prompt_tokens=160, max_tokens=40, prefix_keys=KEYS))
    device.run()
    keys = device.written_keys(0)
    assert len(keys) == 12
    next_turn = (*keys, *document_keys("question", 300)[12:])
    device.submit(make_arrival(1, num_prompt_tokens=300, max_tokens=1, prefix_keys=next_turn))
    device.run()
    assert device.records[1].num_cached_tokens == 12 * 16


def test_a_prompt_that_is_cached_is_predicted_shorter() -> None:
    scheduler = make_scheduler("s-edf")
    run_whole(scheduler, make_arrival(0, num_prompt_tokens=170, max_tokens=1, prefix_keys=KEYS))
    # Only as it is cached can it be on time.
    cached = make_arrival(1, 1.0, num_prompt_tokens=170, ttft_slo_s=0.1, prefix_keys=KEYS)
    other = make_arrival(2, 1.0, num_prompt_tokens=100, ttft_slo_s=5)
    decision = scheduler.decide(1.0, [other, cached])
    assert prefill_of(decision).req_ids == (1,)
    assert decision.timer_s == pytest.approx(1.0 + 0.01 + 0.04)


def test_cached_blocks_are_given_away_when_no_others_are_free() -> None:
    scheduler = make_scheduler(num_blocks=12)
    run_whole(scheduler, make_arrival(0, num_prompt_tokens=160, max_tokens=1, prefix_keys=KEYS))
    assert pool_of(scheduler).num_cached == 10
    assert pool_of(scheduler).num_used == 0
    run_whole(scheduler, make_arrival(1, num_prompt_tokens=100, max_tokens=1))
    run_prefill(scheduler, make_arrival(2, num_prompt_tokens=170, prefix_keys=KEYS))
    assert scheduler.num_cached_tokens(2) == 5 * 16, "the last ones are forgotten first"
    scheduler.check_integrity()


def test_equal_prompts_that_were_computed_side_by_side_both_end() -> None:
    device = Device(make_scheduler("edf", num_blocks=40))
    device.submit(make_arrival(0, num_prompt_tokens=165, max_tokens=20, prefix_keys=KEYS))
    device.submit(
        make_arrival(1, 0.1, num_prompt_tokens=165, max_tokens=20, ttft_slo_s=1, prefix_keys=KEYS)
    )
    device.run()
    assert device.prefill_order() == [0, 1, 0]
    assert [len(device.token_times[r]) for r in range(2)] == [20, 20]
    # Of the two copies one is known, with each one's own answer behind it.
    assert pool_of(device.scheduler).num_cached == 10 + 1 + 1


def test_without_prefix_caching_nothing_is_published_or_found() -> None:
    device = Device(make_scheduler(prefix_caching=False))
    for req_id, arrival_s in ((0, 0.0), (1, 5.0)):
        device.submit(make_arrival(req_id, arrival_s, num_prompt_tokens=160, prefix_keys=KEYS))
    device.run()
    assert device.ttft_s(1) == pytest.approx(0.16)
    assert pool_of(device.scheduler).num_cached == 0
