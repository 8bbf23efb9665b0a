"""HeldRequests: what waits outside the engine, for its restart or for the end of another suspect.

Bounded as the engine bounds what waits inside, in the same words: an engine that restarts takes in
what was held in one go. Pure: no process, no clock, no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowprefill.admission import Admission
from flowprefill.config import EngineConfig
from flowprefill.request import Request


class HeldRequests:
    """Requests and their messages to the engine, in the order in which they came."""

    def __init__(self, config: EngineConfig) -> None:
        self._admission = Admission(
            config.max_waiting_requests, config.max_waiting_tokens, config.queue_timeout_ms / 1000
        )
        self._held: dict[int, tuple[Request, bytes]] = {}
        self._cancelled: list[int] = []
        self._longest_prefill = (1, 0.0)  # tokens, seconds

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._held

    def note_prefill(self, num_tokens: int, device_s: float) -> None:
        """A prefill that computed so many tokens took so long.

        By the longest one it is told what is held: shorter ones share their passes with others.
        """
        self._longest_prefill = max(self._longest_prefill, (num_tokens, device_s))

    def add(self, request: Request, packed: bytes) -> bool:
        """Keep a request and what is to be sent of it, until its queue timeout at most.

        Returns whether it is the next one to expire. Raises QueueFullError.
        """
        due_s = self.next_due_s()
        num_tokens = len(request.prompt_token_ids)
        longest_tokens, longest_s = self._longest_prefill
        prefill_s = num_tokens / longest_tokens * longest_s
        self._admission.admit(request.req_id, num_tokens, request.arrival_s, prefill_s)
        self._held[request.req_id] = (request, packed)
        return self.next_due_s() != due_s

    def cancel(self, req_id: int) -> None:
        """End one that is held."""
        self._remove(req_id)
        self._cancelled.append(req_id)

    def next_due_s(self) -> float | None:
        """When the next one expires."""
        return self._admission.next_timeout_s()

    def take_cancelled(self) -> list[int]:
        """Those that were cancelled since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take_expired(self, now_s: float) -> list[int]:
        """Remove those that have waited too long."""
        expired = self._admission.expire(now_s)
        for req_id in expired:
            del self._held[req_id]
        return expired

    def take(self, may_go: Callable[[Request], bool]) -> Iterator[tuple[Request, bytes]]:
        """Remove those that may go, one by one: each is asked about after the one before went."""
        for req_id, (request, packed) in list(self._held.items()):
            if may_go(request):
                self._remove(req_id)
                yield request, packed

    def _remove(self, req_id: int) -> None:
        del self._held[req_id]
        self._admission.leave(req_id)
