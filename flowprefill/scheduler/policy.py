"""The table of policies: which prefills are kept, and by what key each group is ordered.

One ordering for all of them: the kept ones go before the rest; within a group the smallest key goes
first; ties go to the earlier arrival, then to the smaller id. The order is total and depends on
nothing but its arguments.

| policy | kept | key of the kept | key of the rest |
|---|---|---|---|
| fcfs | all | arrival | - |
| sjf | all | prompt tokens | - |
| srpt | all | remaining device time | - |
| edf | all | deadline | - |
| s-edf | slack >= 0 | deadline | deadline |

s-edf is the FlowPrefill paper's. The authors' code ranks by sign(slack) / deadline, highest first,
which puts the *latest* deadline first among the requests that are late anyway. Here it is the
earliest: with the latest first every late newcomer displaces the late one that runs, so the oldest
request never ends and preemptions pile up without anyone being on time for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may know about a prefill that waits, is parked, or ran until now."""

    @property
    def req_id(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def remaining_s(self) -> float:
        """Predicted device time to the first token."""
        ...


C = TypeVar("C", bound=Candidate)


class KeptSet(Protocol):
    """Picks the candidates that are worth serving first.

    stretch: wall time per device second of a prefill, 1 / (1 - decode share).
    """

    def __call__(self, candidates: Sequence[C], now_s: float, stretch: float) -> Sequence[C]: ...


@dataclass(frozen=True)
class Policy:
    """One row of the table."""

    name: str
    kept: KeptSet
    key: Callable[[Candidate], float]
    """Order of the kept: smallest first."""
    rest_key: Callable[[Candidate], float]
    """Order of the others, which run only when nothing is kept."""

    def choose(self, candidates: Sequence[C], current: C | None, now_s: float, stretch: float) -> C:
        """The candidate that goes first; `candidates` is not empty.

        current: the prefill that ran last and is unfinished. Among equal keys it stays, so equals
        never displace each other.
        """
        group, key = self.kept(candidates, now_s, stretch), self.key
        if not group:
            group, key = candidates, self.rest_key
        smallest = min(map(key, group))
        ties = [candidate for candidate in group if key(candidate) == smallest]
        if current is not None and any(candidate is current for candidate in ties):
            return current
        return min(ties, key=_arrival_then_id)


def slack_s(candidate: Candidate, now_s: float, stretch: float = 1.0) -> float:
    """Seconds by which the first token would meet its deadline if the prefill ran from now on."""
    return candidate.deadline_s - now_s - candidate.remaining_s * stretch


def _arrival_then_id(candidate: Candidate) -> tuple[float, int]:
    return candidate.arrival_s, candidate.req_id


def _all(candidates: Sequence[C], now_s: float, stretch: float) -> Sequence[C]:
    return candidates


def _feasible(candidates: Sequence[C], now_s: float, stretch: float) -> Sequence[C]:
    # slack_s() written out: this line runs for every waiting request of every decision.
    return [c for c in candidates if c.deadline_s - now_s - c.remaining_s * stretch >= 0]


_arrival = attrgetter("arrival_s")
_size = attrgetter("num_prompt_tokens")
_remaining = attrgetter("remaining_s")
_deadline = attrgetter("deadline_s")

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fcfs", _all, _arrival, _arrival),
        Policy("sjf", _all, _size, _size),
        Policy("srpt", _all, _remaining, _remaining),
        Policy("edf", _all, _deadline, _deadline),
        Policy("s-edf", _feasible, _deadline, _deadline),
    )
}
"""The policies by the name that model.json uses."""
