"""The table of policies: which prefills are kept, and by what key each group is ordered.

One ordering for all of them: the kept ones go before the rest; within a group the highest rank goes
first, then the smallest key, then the more urgent (deadline, arrival, id). The order is total and
depends on nothing but its arguments.

| policy | kept | key of the kept | key of the rest |
|---|---|---|---|
| fcfs | all | arrival | - |
| sjf | all | prompt tokens | - |
| srpt | all | remaining device time | - |
| edf | all | deadline | - |
| s-edf | slack >= 0 | deadline | deadline |
| goodput | Moore-Hodgson | deadline | remaining device time |

s-edf is the FlowPrefill paper's. The authors' code ranks by sign(slack) / deadline, highest first,
which puts the *latest* deadline first among the requests that are late anyway. Here it is the
earliest: with the latest first every late newcomer displaces the late one that runs, so the oldest
request never ends and preemptions pile up without anyone being on time for it.

goodput keeps the largest set that can be on time together (J. M. Moore, An n job, one machine
sequencing algorithm for minimizing the number of late jobs, 1968), among the requests known now.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

MAX_CONSIDERED = 2_000
"""Most urgent candidates among which `goodput` drops; bounds the time of a decision. Later ones are
considered when their deadlines come nearer."""


class Candidate(Protocol):
    """What a policy may know about a prefill that waits, is parked, or ran until now."""

    @property
    def req_id(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def urgency(self) -> tuple[int, float, float, int]:
        """Rank (negative), deadline, arrival, id."""
        ...

    @property
    def num_input_tokens(self) -> int: ...
    @property
    def remaining_s(self) -> float:
        """Predicted device time to its first token."""
        ...

    @property
    def num_packed(self) -> int:
        """Candidates that share its prefill, and take the device for it together; 1 = it alone."""
        ...


C = TypeVar("C", bound=Candidate)


class KeptSet(Protocol):
    """Picks the candidates that are worth serving first; keeps their order, that of urgency.

    Lazily where it can: mostly only the first one is asked for.
    stretch: wall time per device second of a prefill, 1 / (1 - decode share).
    """

    def __call__(self, candidates: Sequence[C], now_s: float, stretch: float) -> Iterable[C]: ...


@dataclass(frozen=True)
class Policy:
    """One row of the table."""

    name: str
    kept: KeptSet
    key: Callable[[Candidate], float]
    """Order of the kept: smallest first. A policy that does not keep all orders them by_deadline,
    which is the order that they are in."""
    rest_key: Callable[[Candidate], float]
    """Order of the others, which run only when nothing is kept."""
    can_starve: bool
    """Newcomers can pass a request again and again, even those of its own rank."""

    @property
    def gives_up_late(self) -> bool:
        """Late requests run only while nobody else can be on time."""
        return self.kept is not _all

    def choose(
        self,
        candidates: Sequence[C],
        current: C | None,
        now_s: float,
        stretch: float = 1.0,
        min_gain: float = 0.0,
    ) -> C:
        """The candidate that goes first; `candidates` is not empty and in the order of urgency.

        current: the prefill that ran last and is unfinished. It stays unless another's key is
        smaller by more than min_gain (what a switch costs), so equals never displace each other.
        """
        key, kept = self.key, iter(self.kept(candidates, now_s, stretch))
        best = next(kept, None)
        if best is None:
            key, kept, best = self.rest_key, iter(candidates), candidates[0]
        if key is not by_deadline:
            group = _highest_rank(candidates)
            kept, best = iter(group), min(group, key=key)
        if current is None or current is best or current.rank != best.rank:
            return best
        is_close = key(current) - key(best) <= min_gain
        return current if is_close and any(c is current for c in kept) else best


def slack_s(candidate: Candidate, now_s: float, stretch: float = 1.0) -> float:
    """Seconds by which the first token would meet its deadline if the prefill ran from now on."""
    return candidate.deadline_s - now_s - candidate.remaining_s * stretch


def _highest_rank(group: Sequence[C]) -> Sequence[C]:
    """The head of `group` that has the rank of its first member."""
    rank = group[0].rank
    if group[-1].rank == rank:
        return group
    return group[: bisect_right(group, -rank, key=lambda c: -c.rank)]


def _all(candidates: Sequence[C], now_s: float, stretch: float) -> Iterable[C]:
    return candidates


def _feasible(candidates: Sequence[C], now_s: float, stretch: float) -> Iterator[C]:
    # slack_s() written out: this line runs for every late request of every decision.
    return (c for c in candidates if c.deadline_s - now_s - c.remaining_s * stretch >= 0)


def _moore_hodgson(candidates: Sequence[C], now_s: float, stretch: float) -> Iterable[C]:
    """The largest set of candidates that meet their deadlines if run in the order of urgency.

    Add them in that order; when one would be late, drop what frees the most time for its worth.
    With equal weights that is optimal within a rank; else a greedy heuristic. A higher rank runs
    first and is never dropped for a lower one.
    """
    feasible = _feasible(candidates, now_s, stretch)  # no schedule has the others on time
    considered = list(itertools.islice(feasible, MAX_CONSIDERED))
    rank: int | None = None
    end_s = firm_s = now_s  # firm: without those that can be dropped for a candidate
    droppable: list[tuple[float, int, float]] = []  # heap: most time per worth, index, time
    dropped = set()
    for index, candidate in enumerate(considered):
        if candidate.rank != rank:
            rank, firm_s, droppable = candidate.rank, end_s, []
        deadline_s = candidate.deadline_s
        needed_s = candidate.remaining_s * stretch / candidate.num_packed
        if deadline_s == math.inf:  # a stream that is resumed: it cannot be late, nor be dropped
            firm_s += needed_s
        elif firm_s + needed_s > deadline_s:
            dropped.add(index)
            continue
        else:
            heapq.heappush(droppable, (-needed_s / candidate.weight, index, needed_s))
        end_s += needed_s
        while end_s > deadline_s and droppable:
            _, worst, freed_s = heapq.heappop(droppable)
            end_s -= freed_s
            dropped.add(worst)
    kept = (c for index, c in enumerate(considered) if index not in dropped)
    return itertools.chain(kept, feasible)


_arrival = attrgetter("arrival_s")
_size = attrgetter("num_input_tokens")
_remaining = attrgetter("remaining_s")


def by_deadline(candidate: Candidate) -> float:
    """The deadline that it arrived with: a resumed stream keeps its place."""
    return candidate.urgency[1]


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fcfs", _all, _arrival, _arrival, can_starve=False),
        Policy("sjf", _all, _size, _size, can_starve=True),
        Policy("srpt", _all, _remaining, _remaining, can_starve=True),
        Policy("edf", _all, by_deadline, by_deadline, can_starve=False),
        Policy("s-edf", _feasible, by_deadline, by_deadline, can_starve=True),
        Policy("goodput", _moore_hodgson, by_deadline, _remaining, can_starve=True),
    )
}
"""The policies by the name that model.json uses."""
