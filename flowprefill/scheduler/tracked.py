"""Tracked: what the scheduler knows of one live request."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import Arrival

Urgency = tuple[int, float, float, int]


@dataclass(eq=False, slots=True)
class Tracked:
    """One live request; a policy sees it as its Candidate."""

    req_id: int
    arrival_s: float
    deadline_s: float
    """Latest time of the first token that meets the TTFT objective. Infinite once it was given: the
    stream of an evicted request can be resumed late, but its first token not be missed."""
    tbt_slo_s: float
    rank: int
    weight: float
    tenant: str
    urgency: Urgency
    """The strict total order over requests, smallest first: rank, deadline, arrival, id. Set at the
    arrival; it never changes."""
    num_input_tokens: int
    """Tokens that its prefill computes or finds cached: the prompt, and after an eviction what was
    generated as well."""
    num_total_tokens: int
    """Prompt + max_tokens."""
    prefix_keys: tuple[Hashable, ...]
    remaining_s: float = 0.0
    """Predicted device time to the next token of its prefill, as of the last boundary."""
    status: RequestStatus = RequestStatus.WAITING
    task_id: int | None = None
    """Its prefill, from the start on."""
    num_packed: int = 1
    """Live requests of its prefill, itself included."""
    block_ids: list[int] = field(default_factory=list)
    """Empty while WAITING."""
    num_cached_tokens: int = 0
    """Leading tokens whose KV was found at the start of its prefill."""
    prefill_s: float = 0.0
    """Predicted device time of its prefill when that started."""
    num_preemptions: int = 0
    num_evictions: int = 0
    num_context_tokens: int = 0
    """Tokens in the KV cache; counted from the first token on."""
    last_token_s: float = 0.0
    num_charged_tokens: float = 0.0
    """Tokens that its tenant was charged for."""

    @staticmethod
    def of(arrival: Arrival) -> Tracked:
        """A request that waits for its first prefill."""
        deadline_s = arrival.arrival_s + arrival.ttft_slo_s
        return Tracked(
            req_id=arrival.req_id,
            arrival_s=arrival.arrival_s,
            deadline_s=deadline_s,
            tbt_slo_s=arrival.tbt_slo_s,
            rank=arrival.rank,
            weight=arrival.weight,
            tenant=arrival.tenant,
            urgency=(-arrival.rank, deadline_s, arrival.arrival_s, arrival.req_id),
            num_input_tokens=arrival.num_prompt_tokens,
            num_total_tokens=arrival.num_prompt_tokens + arrival.max_tokens,
            prefix_keys=arrival.prefix_keys,
        )

    @property
    def due_s(self) -> float:
        """When its next token is due."""
        return self.last_token_s + self.tbt_slo_s

    def give_token(self, at_s: float) -> None:
        """It has its first or next token."""
        self.last_token_s = at_s
        self.deadline_s = math.inf
