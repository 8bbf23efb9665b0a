"""What late prefills are owed, whoever else wants the device, and what that costs the others.

Request 0 is a long prefill that cannot be on time, beside a stream of short ones that leaves the
device no idle moment.
"""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.scheduler.ageing import PERIOD_S
from flowprefill.scheduler.events import PrefillTask
from flowprefill.scheduler.policy import POLICIES
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    BLOCK_SIZE,
    SLICE_S,
    TOKENS_PER_S,
    make_arrival,
    make_scheduler,
)

SHARE = 0.05
LATE_S = 1.1
"""The deadline of request 0."""
END_S = LATE_S + 8 * PERIOD_S
SHORT_S = 0.02
"""Between two arrivals of the stream."""
LONG_TOKENS = round(TOKENS_PER_S * END_S)
"""A prompt that takes the device until END_S."""
LONG_BLOCKS = LONG_TOKENS // BLOCK_SIZE + 50
"""Blocks of such a prompt, and some."""
PASSING_POLICIES = sorted(name for name, policy in POLICIES.items() if policy.can_starve)


def run_long_beside_shorts(
    policy: str, *, share: float = SHARE, num_tokens: int = 20, slo_s: float = 2.0, **fields: Any
) -> Device:
    """Shorts each SHORT_S, and some at once: num_tokens 20 takes the whole device."""
    device = Device(make_scheduler(policy, num_blocks=400, starvation_share=share))
    device.submit(make_arrival(0, 1.0, num_prompt_tokens=4000, max_tokens=1, ttft_slo_s=0.1))
    for req_id in range(1, 1 + round(END_S / SHORT_S)):
        arrival_s = SHORT_S * max(0, req_id - 10)
        device.submit(
            make_arrival(
                req_id,
                arrival_s,
                num_prompt_tokens=num_tokens,
                max_tokens=1,
                ttft_slo_s=slo_s,
                **fields,
            )
        )
    device.run(until_s=END_S)
    return device


def share_of_long(device: Device) -> float:
    return device.prefill_s(0, LATE_S, END_S) / (END_S - LATE_S)


def are_shorts_on_time(device: Device) -> bool:
    served = [req_id for req_id in device.token_times if req_id != 0]
    assert len(served) > 0.9 * END_S / SHORT_S
    return all(device.is_on_time(req_id) for req_id in served)


@pytest.mark.parametrize("policy", PASSING_POLICIES)
def test_beside_a_load_that_is_on_time_a_late_prefill_gets_its_share_and_nobody_else_is_late(
    policy: str,
) -> None:
    device = run_long_beside_shorts(policy)
    assert share_of_long(device) == pytest.approx(SHARE, rel=0.2)
    first_s = min(ran.start_s for ran in device.log if ran.req_ids == (0,))
    assert first_s <= LATE_S + 2 * PERIOD_S
    assert are_shorts_on_time(device)


@pytest.mark.parametrize("policy", PASSING_POLICIES)
def test_without_a_share_it_starves(policy: str) -> None:
    device = run_long_beside_shorts(policy, share=0.0)
    assert share_of_long(device) < 1e-9


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_low_rank_progresses_behind_a_stream_of_high_ranks(policy: str) -> None:
    device = run_long_beside_shorts(policy, rank=1)
    assert share_of_long(device) == pytest.approx(SHARE, rel=0.2)
    assert are_shorts_on_time(device)
    starved = run_long_beside_shorts(policy, rank=1, share=0.0)
    assert share_of_long(starved) < 1e-9


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
def test_a_late_long_prefill_progresses_behind_late_short_ones(policy: str) -> None:
    device = run_long_beside_shorts(policy, num_tokens=30, slo_s=0.001)
    # At first there are others that have been late longer.
    assert SHARE / 2 <= share_of_long(device) <= 1.2 * SHARE


def test_shorts_that_leave_a_stretch_no_room_lose_only_the_share() -> None:
    """Each could wait for 10 ms. The share is taken all the same, in pieces that harm few."""
    device = run_long_beside_shorts("s-edf", num_tokens=19, slo_s=0.3)
    late = [r for r in device.token_times if r and not device.is_on_time(r)]
    assert share_of_long(device) >= 0.8 * SHARE
    assert len(late) <= 0.02 * len(device.token_times)


@pytest.mark.parametrize("policy", ["fcfs", "edf"])
def test_a_policy_that_lets_nobody_pass_is_left_alone(policy: str) -> None:
    overload: dict[str, Any] = {"num_tokens": 30, "slo_s": 0.5}
    with_share = run_long_beside_shorts(policy, **overload)
    without = run_long_beside_shorts(policy, share=0.0, **overload)
    assert with_share.decisions == without.decisions


@pytest.mark.parametrize("policy", PASSING_POLICIES)
def test_it_is_served_beside_one_long_prefill_although_nothing_happens(policy: str) -> None:
    device = Device(make_scheduler(policy, num_blocks=2 * LONG_BLOCKS))
    device.submit(make_arrival(1, num_prompt_tokens=LONG_TOKENS, max_tokens=1, ttft_slo_s=60))
    late = make_arrival(0, 1.0, num_prompt_tokens=LONG_TOKENS + 500, max_tokens=1, ttft_slo_s=0.1)
    device.submit(late)
    device.run(until_s=END_S)
    first_s = min(ran.start_s for ran in device.log if ran.req_ids == (0,))
    assert first_s <= LATE_S + 2 * PERIOD_S
    assert share_of_long(device) == pytest.approx(SHARE, rel=0.25)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("has_room", [True, False])
def test_late_work_alone_makes_few_decisions(policy: str, has_room: bool) -> None:
    """Also where it cannot start, for lack of room beside request 1."""
    num_blocks = 2 * LONG_BLOCKS if has_room else LONG_BLOCKS
    device = Device(make_scheduler(policy, num_blocks=num_blocks))
    rank = 0 if has_room else 1  # then nobody takes its blocks
    first = make_arrival(1, num_prompt_tokens=LONG_TOKENS, max_tokens=1, ttft_slo_s=60, rank=rank)
    late = make_arrival(0, 1.0, num_prompt_tokens=LONG_TOKENS + 200, max_tokens=1, ttft_slo_s=0.1)
    device.submit(first)
    device.submit(late)
    device.run(until_s=END_S)
    num = sum(t >= LATE_S for t, _ in device.decisions)
    assert num <= 3 * (END_S - LATE_S) / PERIOD_S


def test_the_one_that_has_been_late_longest_is_served_first() -> None:
    device = Device(make_scheduler("sjf", num_blocks=2 * LONG_BLOCKS))
    device.submit(make_arrival(0, num_prompt_tokens=LONG_TOKENS, max_tokens=1, ttft_slo_s=60))
    for req_id, ttft_slo_s in ((1, 0.3), (2, 0.2), (3, 0.1)):
        num_tokens = LONG_TOKENS + req_id
        device.submit(
            make_arrival(
                req_id, 0.1, num_prompt_tokens=num_tokens, max_tokens=1, ttft_slo_s=ttft_slo_s
            )
        )
    device.run(until_s=4 * PERIOD_S)
    assert set(device.prefill_order()) == {0, 3}


def test_a_stretch_waits_for_others_until_twice_as_much_is_owed() -> None:
    """Request 1 has no time to lose: the first stretch that is due would make it late."""
    device = Device(make_scheduler("s-edf"))
    device.submit(make_arrival(0, num_prompt_tokens=5000, max_tokens=1, ttft_slo_s=0.1))
    run_s = 3 * PERIOD_S  # longer than the wait until twice as much is owed
    tight = make_arrival(
        1,
        0.05,
        num_prompt_tokens=round(TOKENS_PER_S * run_s),
        max_tokens=1,
        ttft_slo_s=run_s + 0.01,
    )
    device.submit(tight)
    device.run()
    first_s = min(
        ran.start_s for ran in device.log if ran.req_ids == (0,) and ran.start_s > 0.05 + SLICE_S
    )
    assert first_s == pytest.approx(0.1 + 2 * PERIOD_S, abs=2 * SLICE_S)
    # From then on both are late, and the policy itself serves request 0.
    assert len(device.decisions) <= 10


def test_what_a_late_prefill_runs_by_itself_is_not_owed_to_it() -> None:
    device = Device(make_scheduler("s-edf"))
    num_tokens = round(TOKENS_PER_S * 3 * PERIOD_S)
    device.submit(make_arrival(0, num_prompt_tokens=num_tokens, max_tokens=1, ttft_slo_s=0.1))
    urgent = make_arrival(1, 2.5 * PERIOD_S, num_prompt_tokens=400, max_tokens=1, ttft_slo_s=0.45)
    device.submit(urgent)
    device.run()
    assert device.prefill_order() == [0, 1, 0]
    assert device.is_on_time(1)
    tasks = [d.task for _, d in device.decisions if isinstance(d.task, PrefillTask)]
    assert len(tasks) == 3
