"""Candidates with every attribute in sight, for tests of the table of policies alone."""

from __future__ import annotations

from dataclasses import dataclass

from flowprefill.scheduler.policy import POLICIES


@dataclass(frozen=True)
class Prefill:
    req_id: int
    arrival_s: float = 0.0
    deadline_s: float = 10.0
    num_input_tokens: int = 100
    remaining_s: float = 0.1
    rank: int = 0
    weight: float = 1.0
    num_packed: int = 1
    first_deadline_s: float | None = None
    """The deadline that it arrived with, if that no longer counts."""

    @property
    def urgency(self) -> tuple[int, float, float, int]:
        first = self.first_deadline_s
        deadline_s = self.deadline_s if first is None else first
        return (-self.rank, deadline_s, self.arrival_s, self.req_id)


def by_urgency(*candidates: Prefill) -> list[Prefill]:
    """In the order in which a policy gets them."""
    return sorted(candidates, key=lambda c: c.urgency)


def choose(
    policy: str,
    *candidates: Prefill,
    current: Prefill | None = None,
    now_s: float = 0.0,
    stretch: float = 1.0,
    min_gain: float = 0.0,
) -> int:
    """The req_id that the policy puts first."""
    ordered = by_urgency(*candidates)
    return POLICIES[policy].choose(ordered, current, now_s, stretch, min_gain).req_id


def kept(policy: str, *candidates: Prefill, now_s: float = 0.0, stretch: float = 1.0) -> set[int]:
    """The req_ids that the policy serves first."""
    return {c.req_id for c in POLICIES[policy].kept(by_urgency(*candidates), now_s, stretch)}
