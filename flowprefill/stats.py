"""What an engine says of itself: EngineInfo once after its start, EngineStats at any time.

No torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a started engine."""

    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_kv_blocks: int
    block_size: int
    bit_invariant: bool
    """True when the probe at load found row results independent of the rows beside them."""

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> EngineInfo:
        return EngineInfo(**wire)


@dataclass(frozen=True)
class EngineStats:
    """Gauges (now) and counters (since the engine's start)."""

    num_waiting: int = 0
    num_prefilling: int = 0
    """Running and parked prefills."""
    num_decoding: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks: int = 0
    num_decisions: int = 0
    num_wakeups: int = 0
    """Times the engine thread woke from waiting on its inbox."""
    decision_seconds_total: float = 0.0
    num_preemptions: int = 0
    num_slices: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_started: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_rejected: int = 0
    num_failed: int = 0
    blocking_s: list[float] = field(default_factory=list)
    """Last blocking times, 4,096 at most: event into the inbox to the newcomer's first slice."""

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> EngineStats:
        return EngineStats(**wire)
