"""Tracked: what the scheduler knows of one live request."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowprefill.request import RequestStatus


@dataclass(eq=False, slots=True)
class Tracked:
    """One live request; a policy sees it as its Candidate."""

    req_id: int
    arrival_s: float
    deadline_s: float
    """Latest time of the first token that meets the TTFT objective."""
    tbt_slo_s: float
    num_prompt_tokens: int
    num_blocks: int
    """KV blocks of its whole need: prompt + max_tokens."""
    remaining_s: float
    """Predicted device time to the first token, as of the last boundary once it ran."""
    status: RequestStatus = RequestStatus.WAITING
    task_id: int | None = None
    """Its prefill, from the start on."""
    block_ids: list[int] = field(default_factory=list)
    """Empty while WAITING."""
    num_preemptions: int = 0
    num_context_tokens: int = 0
    """Tokens in the KV cache; counted from the first token on."""
    last_token_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When its next token is due."""
        return self.last_token_s + self.tbt_slo_s
