"""Cluster: many replicas of one model behind a router, in one virtual time.

Replicas know nothing of each other, so each has a clock of its own that stands where something
last happened to it, and one heap holds when each goes on. An arrival is routed after everything
that happened before it, and wakes its replica only. What has ended is counted and forgotten:
memory grows by a number per request.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from flowprefill.scheduler.events import Decision, Event
from flowprefill.simulator.cost import CostModel
from flowprefill.simulator.offered import OfferedRequest
from flowprefill.simulator.replay import Setup, arrival_of
from flowprefill.simulator.router import ROUTERS, Router
from flowprefill.simulator.simulator import RequestRecord, Simulator


class Tally:
    """What came of the requests that have ended."""

    def __init__(self) -> None:
        self.num_by_class: Counter[str] = Counter()
        """All that arrived."""
        self.on_time_by_class: Counter[str] = Counter()
        self.ttft_s = array("d")
        """Infinite for those that were rejected."""
        self.num_ended = 0
        self.num_gaps_kept = 0
        """Requests of which no gap between two tokens exceeded the TBT objective."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.max_preemptions = 0
        """Of one request, up to its first token."""

    @property
    def attainment(self) -> float:
        """Share of the requests that had their first tokens in time."""
        return self.on_time_by_class.total() / self.num_by_class.total()

    @property
    def attainment_by_class(self) -> dict[str, float]:
        return {
            name: self.on_time_by_class[name] / number
            for name, number in sorted(self.num_by_class.items())
        }

    def add(self, name: str, record: RequestRecord) -> None:
        """A request of that SLO class has ended."""
        arrival = record.arrival
        self.num_ended += 1
        self.ttft_s.append(record.ttft_s)
        self.on_time_by_class[name] += (
            record.first_token_s <= arrival.arrival_s + arrival.ttft_slo_s
        )
        self.num_gaps_kept += record.max_gap_s <= arrival.tbt_slo_s
        self.num_prompt_tokens += arrival.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.max_preemptions = max(self.max_preemptions, record.num_preemptions)


class Replica(Simulator):
    """One of a cluster. It tells of first tokens and rejections, and forgets requests that have
    ended."""

    def __init__(self, index: int, cluster: Cluster, setup: Setup, cost: CostModel) -> None:
        scheduler = setup.scheduler(cluster.predictor)
        super().__init__(scheduler, cost, cluster.predictor, setup.granularity)
        self._index = index
        self._cluster = cluster

    def on_token(self, record: RequestRecord) -> None:
        req_id = record.arrival.req_id
        if record.num_tokens == 1:
            self._cluster.router.first_token(self._index, req_id, self.now_s)
        if record.ended:
            del self.records[req_id]
            self._cluster.end(record)

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        for req_id in decision.rejected:
            self._cluster.router.first_token(self._index, req_id, self.now_s)
            self._cluster.end(self.records.pop(req_id))


class Cluster:
    """Replicas of one setup, and the tally of what they did."""

    def __init__(self, setup: Setup, num_replicas: int, router: str) -> None:
        """router: a name of router.ROUTERS; it predicts prefills as the schedulers do."""
        self.predictor = setup.predictor()
        self.router: Router = ROUTERS[router](num_replicas, self.predictor.prefill_s, setup.seed)
        self.tally = Tally()
        cost = setup.platform.cost(setup.granularity)
        self.replicas = [Replica(i, self, setup, cost) for i in range(num_replicas)]
        self._block_tokens = setup.platform.block_tokens
        self._class_of: dict[int, str] = {}  # of live requests
        self._wakes: list[tuple[float, int]] = []  # heap; one that no longer holds is skipped

    @property
    def now_s(self) -> float:
        """When the last thing happened."""
        return max(replica.now_s for replica in self.replicas)

    def run(self, offered: Iterable[OfferedRequest]) -> None:
        """Let all requests arrive, in the order of their arrival, and end."""
        for req_id, one in enumerate(offered):
            # What ends at the very time of an arrival is decided upon together with it.
            self._run_until(one.request.arrival_s)
            self._arrive(req_id, one)
        self._run_until(math.inf)

    def end(self, record: RequestRecord) -> None:
        """A request has its last token, or was rejected."""
        self.tally.add(self._class_of.pop(record.arrival.req_id), record)

    def _arrive(self, req_id: int, one: OfferedRequest) -> None:
        arrival = arrival_of(req_id, one.request, one.objective, self._block_tokens)
        self._class_of[req_id] = one.objective.name
        self.tally.num_by_class[one.objective.name] += 1
        index = self.router.choose(arrival)
        replica = self.replicas[index]
        replica.submit(arrival)
        heapq.heappush(self._wakes, (replica.wake_s, index))

    def _run_until(self, until_s: float) -> None:
        """All that happens before until_s."""
        wakes, replicas = self._wakes, self.replicas
        while wakes and wakes[0][0] < until_s:
            wake_s, index = heapq.heappop(wakes)
            replica = replicas[index]
            if replica.wake_s == wake_s:  # else it was woken by an arrival, and has another
                replica.wake()
                heapq.heappush(wakes, (replica.wake_s, index))
