from __future__ import annotations

import itertools
import typing
from dataclasses import dataclass

import pytest

from flowprefill.config import EngineConfig
from flowprefill.scheduler.policy import POLICIES, slack_s


@dataclass(frozen=True)
class Prefill:
    """A Candidate with every attribute in sight."""

    req_id: int
    arrival_s: float = 0.0
    deadline_s: float = 10.0
    num_prompt_tokens: int = 100
    remaining_s: float = 0.1


def choose(policy: str, *candidates: Prefill, current: Prefill | None = None, now_s: float = 0.0,
           stretch: float = 1.0) -> int:  # fmt: skip
    return POLICIES[policy].choose(candidates, current, now_s, stretch).req_id


def test_every_policy_of_the_configuration_is_in_the_table() -> None:
    names = typing.get_args(typing.get_type_hints(EngineConfig)["policy"])
    assert set(POLICIES) == set(names)
    assert all(name == policy.name for name, policy in POLICIES.items())


@pytest.mark.parametrize(
    ("policy", "first"), [("fcfs", 0), ("sjf", 1), ("srpt", 2), ("edf", 3), ("s-edf", 3)]
)
def test_each_policy_orders_by_its_own_key(policy: str, first: int) -> None:
    candidates = [
        Prefill(0, arrival_s=0.0, deadline_s=20, num_prompt_tokens=500, remaining_s=0.5),
        Prefill(1, arrival_s=1.0, deadline_s=15, num_prompt_tokens=50, remaining_s=0.4),
        Prefill(2, arrival_s=2.0, deadline_s=12, num_prompt_tokens=900, remaining_s=0.1),
        Prefill(3, arrival_s=3.0, deadline_s=8, num_prompt_tokens=700, remaining_s=0.7),
    ]
    for order in itertools.permutations(candidates):
        assert choose(policy, *order, now_s=3.0) == first


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ties_go_to_the_earlier_arrival_then_to_the_smaller_id(policy: str) -> None:
    if policy != "fcfs":
        assert choose(policy, Prefill(1, arrival_s=2.0), Prefill(2, arrival_s=1.0)) == 2
    assert choose(policy, Prefill(4), Prefill(3), Prefill(5)) == 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_equal_key_never_displaces_the_current_prefill(policy: str) -> None:
    current = Prefill(7)
    assert choose(policy, Prefill(1), current, Prefill(2), current=current) == 7


def test_s_edf_serves_the_feasible_before_the_late() -> None:
    late = Prefill(0, deadline_s=1.0, remaining_s=2.0)
    feasible = Prefill(1, deadline_s=9.0, remaining_s=2.0)
    assert choose("s-edf", late, feasible) == 1
    assert choose("s-edf", late, feasible, current=late) == 1
    assert choose("edf", late, feasible) == 0


def test_s_edf_serves_the_late_by_earliest_deadline() -> None:
    late = [Prefill(i, deadline_s=1.0 + i, remaining_s=50.0) for i in range(3)]
    assert choose("s-edf", *reversed(late)) == 0


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
