"""Routers: which replica a request goes to. Pure.

They know what a router in front of servers knows: what they sent where, with their own predictions
of prefill times, and the first tokens that came back. They look into no replica. Decode steps and
shared prefixes count for nothing. A request goes to one replica when it arrives, and stays.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol

from flowprefill.scheduler.events import Arrival

PrefillSeconds = Callable[[int], float]
"""Predicted prefill seconds of a prompt of so many tokens, alone."""

NUM_CANDIDATES = 16
"""Replicas that slack-aware looks at for a request; a few at random do nearly as well as all
(Mitzenmacher, The power of two choices in randomized load balancing, 2001)."""


class Router(Protocol):
    """Sends requests to replicas 0..num_replicas-1."""

    def choose(self, arrival: Arrival) -> int:
        """The replica for a request that arrives now, which is its arrival_s."""
        ...

    def first_token(self, replica: int, req_id: int, now_s: float) -> None:
        """A request that was sent there has its first token, or was rejected."""
        ...


class RoundRobin:
    """One replica after the other."""

    def __init__(self, num_replicas: int, prefill_s: PrefillSeconds, seed: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, arrival: Arrival) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._num_replicas
        return chosen

    def first_token(self, replica: int, req_id: int, now_s: float) -> None:
        pass


class Backlogs:
    """Predicted seconds of prefill that each replica still has before it.

    A replica is taken to work without pause while it has something to do: its backlog grows with
    each request that is sent there and shrinks by a second per second. It is at most the sum of the
    prefills whose first tokens have not come, so errors do not add up.
    """

    def __init__(self, num_replicas: int) -> None:
        self.unfinished: list[dict[int, tuple[float, float]]] = [{} for _ in range(num_replicas)]
        """By replica and request: deadline, predicted prefill seconds."""
        self._sums_s = [0.0] * num_replicas  # of the unfinished ones
        self._free_s = [0.0] * num_replicas  # when each would have done its work
        self._heap = [(0.0, replica) for replica in range(num_replicas)]  # some are outdated

    def backlog_s(self, replica: int, now_s: float) -> float:
        return max(0.0, self._free_s[replica] - now_s)

    def least(self) -> int:
        """The replica with the smallest backlog; of several idle ones that which is so longest."""
        while self._heap[0][0] != self._free_s[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, replica: int, arrival: Arrival, prefill_s: float) -> None:
        """A request is sent there."""
        now_s = arrival.arrival_s
        self.unfinished[replica][arrival.req_id] = (now_s + arrival.ttft_slo_s, prefill_s)
        self._sums_s[replica] += prefill_s
        self._set(replica, max(self._free_s[replica], now_s) + prefill_s)

    def remove(self, replica: int, req_id: int, now_s: float) -> None:
        """Its first token has come, or its rejection."""
        unfinished = self.unfinished[replica]
        _, prefill_s = unfinished.pop(req_id)
        left_s = self._sums_s[replica] = self._sums_s[replica] - prefill_s if unfinished else 0.0
        if now_s + left_s < self._free_s[replica]:
            self._set(replica, now_s + left_s)

    def _set(self, replica: int, free_s: float) -> None:
        self._free_s[replica] = free_s
        heapq.heappush(self._heap, (free_s, replica))
        if len(self._heap) > 8 * len(self._free_s) + 64:
            self._heap = [(time_s, index) for index, time_s in enumerate(self._free_s)]
            heapq.heapify(self._heap)


class LeastLoad:
    """The replica with the fewest predicted seconds of prefill waiting and running."""

    def __init__(self, num_replicas: int, prefill_s: PrefillSeconds, seed: int) -> None:
        self._prefill_s = prefill_s
        self._backlogs = Backlogs(num_replicas)

    def choose(self, arrival: Arrival) -> int:
        chosen = self._backlogs.least()
        self._backlogs.add(chosen, arrival, self._prefill_s(arrival.num_prompt_tokens))
        return chosen

    def first_token(self, replica: int, req_id: int, now_s: float) -> None:
        self._backlogs.remove(replica, req_id, now_s)


class SlackAware:
    """The replica on which the request has most slack.

    Slack is the time from its predicted first token to its deadline. Before it a replica runs the
    unfinished requests of earlier deadlines that are not late yet, up to the whole backlog: so do
    s-edf and goodput. Replicas of equal slack (mostly those where nothing is as urgent) rank by the
    smaller backlog. If no slack is positive, the request goes where the backlog is smallest: it
    will be late anywhere, and there it is in the way of fewest. Looked at are NUM_CANDIDATES
    replicas drawn at random, and the one with the smallest backlog.
    """

    def __init__(self, num_replicas: int, prefill_s: PrefillSeconds, seed: int) -> None:
        self._prefill_s = prefill_s
        self._backlogs = Backlogs(num_replicas)
        self._replicas = range(num_replicas)
        self._rng = random.Random(seed)

    def choose(self, arrival: Arrival) -> int:
        prefill_s = self._prefill_s(arrival.num_prompt_tokens)
        least = chosen = self._backlogs.least()
        best_s, best_backlog_s = self._ahead_s(least, arrival)
        for replica in self._candidates():
            ahead_s, backlog_s = self._ahead_s(replica, arrival)
            if (ahead_s, backlog_s) < (best_s, best_backlog_s):
                chosen, best_s, best_backlog_s = replica, ahead_s, backlog_s
        if arrival.ttft_slo_s - best_s - prefill_s <= 0:
            chosen = least
        self._backlogs.add(chosen, arrival, prefill_s)
        return chosen

    def first_token(self, replica: int, req_id: int, now_s: float) -> None:
        self._backlogs.remove(replica, req_id, now_s)

    def _candidates(self) -> list[int] | range:
        if len(self._replicas) <= NUM_CANDIDATES:
            return self._replicas
        draw, num_replicas = self._rng.random, len(self._replicas)
        return [int(draw() * num_replicas) for _ in range(NUM_CANDIDATES)]

    def _ahead_s(self, replica: int, arrival: Arrival) -> tuple[float, float]:
        """Predicted seconds of work that goes before it there, and of all work there."""
        now_s = arrival.arrival_s
        deadline_s = now_s + arrival.ttft_slo_s
        backlog_s = self._backlogs.backlog_s(replica, now_s)
        if not backlog_s:
            return 0.0, 0.0
        ahead_s = 0.0
        for other_s, prefill_s in self._backlogs.unfinished[replica].values():
            if now_s <= other_s <= deadline_s:
                ahead_s += prefill_s
        return min(ahead_s, backlog_s), backlog_s


ROUTERS: dict[str, Callable[[int, PrefillSeconds, int], Router]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "slack-aware": SlackAware,
}
"""By the name that the command line takes; made of the number of replicas, predicted prefill
seconds, and a seed."""
