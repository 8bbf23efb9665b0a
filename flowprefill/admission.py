"""Admission: the bound on what waits, and when waiting ends. Pure; no clock, no threads.

It knows a request from its submission until it starts, is cancelled, or has waited too long.
Whoever gets True from `leave`, or the id from `expire`, owns what follows, so that of two who end a
request at the same time only one answers it. Callers on several threads share one lock around it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from flowprefill.errors import QueueFullError
from flowprefill.retry_after import with_retry_after

QUEUE_FULL = "the queue is full"
"""What the message begins with when a bound on waiting requests is reached."""
_MIN_SWEEP = 64
"""Heap entries of requests that have left are swept when they are half of it, but not below."""


@dataclass(frozen=True)
class _Waiting:
    num_tokens: int
    prefill_s: float


class Admission:
    """The requests that wait for their start.

    Each call takes O(log n) of what waits, amortised.
    """

    def __init__(
        self, max_waiting_requests: int, max_waiting_tokens: int | None, queue_timeout_s: float
    ) -> None:
        """max_waiting_tokens: prompt tokens; None = no bound. queue_timeout_s: seconds from its
        arrival after which a request waits no longer."""
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._queue_timeout_s = queue_timeout_s
        self._waiting: dict[int, _Waiting] = {}
        self._arrivals: list[tuple[float, int]] = []  # heap of (arrival_s, req_id)
        self._num_tokens = 0
        self._prefill_s = 0.0

    def __contains__(self, req_id: int) -> bool:
        """Whether the request waits."""
        return req_id in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return self._num_tokens

    @property
    def waiting_prefill_s(self) -> float:
        """Predicted prefill of the requests that wait, seconds."""
        return abs(self._prefill_s)  # a sum of none may be a little below 0

    def admit(self, req_id: int, num_tokens: int, arrival_s: float, prefill_s: float) -> None:
        """Note that a request waits; an id is used once. prefill_s: its predicted prefill, seconds.

        Raises QueueFullError if a bound would be passed. A request that finds nobody waiting is
        taken whatever its tokens, so every prompt that fits the model can be served.
        """
        assert req_id not in self._waiting, f"request {req_id} waits already"
        if self._waiting:
            self._check_bounds(num_tokens)
        self._waiting[req_id] = _Waiting(num_tokens, prefill_s)
        heapq.heappush(self._arrivals, (arrival_s, req_id))
        self._num_tokens += num_tokens
        self._prefill_s += prefill_s

    def leave(self, req_id: int) -> bool:
        """The request starts or ends. True if it still waited; False if somebody was first."""
        waiting = self._waiting.pop(req_id, None)
        if waiting is None:
            return False
        self._num_tokens -= waiting.num_tokens
        # Rounding errors of the sum end with each empty queue
        self._prefill_s = self._prefill_s - waiting.prefill_s if self._waiting else 0.0
        if len(self._arrivals) > 2 * len(self._waiting) + _MIN_SWEEP:
            self._arrivals = [entry for entry in self._arrivals if entry[1] in self._waiting]
            heapq.heapify(self._arrivals)
        return True

    def next_timeout_s(self) -> float | None:
        """When the next request will have waited too long; None if nobody waits."""
        while self._arrivals and self._arrivals[0][1] not in self._waiting:
            heapq.heappop(self._arrivals)
        return self._arrivals[0][0] + self._queue_timeout_s if self._arrivals else None

    def expire(self, now_s: float) -> list[int]:
        """Remove the requests that have waited too long. Returns their ids, first arrival first."""
        expired: list[int] = []
        while (timeout_s := self.next_timeout_s()) is not None and timeout_s <= now_s:
            req_id = heapq.heappop(self._arrivals)[1]
            self.leave(req_id)
            expired.append(req_id)
        return expired

    def _check_bounds(self, num_tokens: int) -> None:
        if len(self._waiting) >= self._max_requests:
            bound = f"max_waiting_requests={self._max_requests}"
        elif self._max_tokens is not None and self._num_tokens + num_tokens > self._max_tokens:
            bound = f"max_waiting_tokens={self._max_tokens}, this prompt has {num_tokens}"
        else:
            return
        message = (
            f"{QUEUE_FULL} ({bound}): {len(self._waiting)} requests with {self._num_tokens} "
            f"prompt tokens wait, about {self.waiting_prefill_s:.1f} s of prefill"
        )
        raise QueueFullError(with_retry_after(message, self.waiting_prefill_s))
