"""The table of policies: keys, ties, ranks, and the candidates that can be on time."""

from __future__ import annotations

import itertools
import typing

import pytest

from flowprefill.config import EngineConfig
from flowprefill.scheduler.policy import POLICIES, slack_s
from tests.unit.scheduler.candidates import Prefill, choose


def test_every_policy_of_the_configuration_is_in_the_table() -> None:
    names = typing.get_args(typing.get_type_hints(EngineConfig)["policy"])
    assert set(POLICIES) == set(names)
    assert all(name == policy.name for name, policy in POLICIES.items())


@pytest.mark.parametrize(
    ("policy", "first"),
    [("fcfs", 0), ("sjf", 1), ("srpt", 2), ("edf", 3), ("s-edf", 3), ("goodput", 3)],
)
def test_each_policy_orders_by_its_own_key(policy: str, first: int) -> None:
    candidates = [
        Prefill(0, arrival_s=0.0, deadline_s=20, num_input_tokens=500, remaining_s=0.5),
        Prefill(1, arrival_s=1.0, deadline_s=15, num_input_tokens=50, remaining_s=0.4),
        Prefill(2, arrival_s=2.0, deadline_s=12, num_input_tokens=900, remaining_s=0.1),
        Prefill(3, arrival_s=3.0, deadline_s=8, num_input_tokens=700, remaining_s=0.7),
    ]
    assert choose(policy, *candidates, now_s=3.0) == first


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ties_go_to_the_earlier_arrival_then_to_the_smaller_id(policy: str) -> None:
    assert choose(policy, Prefill(1, arrival_s=2.0), Prefill(2, arrival_s=1.0)) == 2
    assert choose(policy, Prefill(4), Prefill(3), Prefill(5)) == 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_current_prefill_is_displaced_only_for_more_than_the_gain_asked_for(
    policy: str,
) -> None:
    key = {"fcfs": "arrival_s", "sjf": "num_input_tokens", "srpt": "remaining_s"}
    field = key.get(policy, "deadline_s")
    current = Prefill(7, **{field: 8.0})
    for value, first in ((8.0, 7), (7.5, 7), (7.4, 1)):
        other = Prefill(1, **{field: value})
        assert choose(policy, other, current, current=current, min_gain=0.5) == first


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_higher_rank_goes_first_and_the_policy_orders_within_it(policy: str) -> None:
    candidates = [
        Prefill(0, arrival_s=0.0, deadline_s=5, num_input_tokens=10, remaining_s=0.1),
        Prefill(1, arrival_s=2.0, deadline_s=9, num_input_tokens=90, remaining_s=0.9, rank=1),
        Prefill(2, arrival_s=1.0, deadline_s=8, num_input_tokens=80, remaining_s=0.8, rank=1),
    ]
    for current in (None, *candidates):
        assert choose(policy, *candidates, now_s=2.0, current=current) == 2


@pytest.mark.parametrize("policy", ["s-edf", "goodput"])
def test_a_higher_rank_that_will_be_late_goes_behind_a_lower_one_that_can_be_on_time(
    policy: str,
) -> None:
    late = Prefill(0, deadline_s=1.0, remaining_s=2.0, rank=3)
    feasible = Prefill(1, deadline_s=9.0, remaining_s=2.0)
    for current in (None, late, feasible):
        assert choose(policy, late, feasible, current=current) == 1


@pytest.mark.parametrize("policy", ["s-edf", "goodput"])
def test_the_feasible_go_before_the_late(policy: str) -> None:
    late = Prefill(0, deadline_s=1.0, remaining_s=2.0)
    feasible = Prefill(1, deadline_s=9.0, remaining_s=2.0)
    assert choose(policy, late, feasible) == 1
    assert choose(policy, late, feasible, current=late) == 1
    assert choose("edf", late, feasible) == 0


def test_s_edf_serves_the_late_by_earliest_deadline_and_goodput_by_remaining_time() -> None:
    late = [Prefill(i, deadline_s=1.0 + i, remaining_s=50.0 - i) for i in range(3)]
    for order in itertools.permutations(late):
        assert choose("s-edf", *order) == 0
        assert choose("goodput", *order) == 2


def test_a_resumed_stream_keeps_the_place_of_its_first_deadline() -> None:
    resumed = Prefill(0, deadline_s=float("inf"), first_deadline_s=5.0)
    for policy in ("edf", "s-edf", "goodput"):
        assert choose(policy, resumed, Prefill(1, deadline_s=6.0), now_s=5.5) == 0
        assert choose(policy, resumed, Prefill(1, deadline_s=4.9), now_s=4.0) == 1


def test_slack_of_exactly_zero_is_feasible() -> None:
    exact = Prefill(0, deadline_s=2.0, remaining_s=2.0)
    assert slack_s(exact, now_s=0.0) == 0
    assert choose("s-edf", exact, Prefill(1, deadline_s=3.0)) == 0
    assert choose("s-edf", exact, Prefill(1, deadline_s=3.0), now_s=0.001) == 1


def test_slack_accounts_for_the_time_that_decode_takes() -> None:
    tight = Prefill(0, deadline_s=2.0, remaining_s=1.5)
    assert slack_s(tight, now_s=0.0, stretch=2.0) == -1.0
    assert choose("s-edf", tight, Prefill(1), stretch=1.0) == 0
    assert choose("s-edf", tight, Prefill(1), stretch=2.0) == 1
