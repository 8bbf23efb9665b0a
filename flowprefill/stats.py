"""What an engine says of itself: EngineInfo once after its start, EngineStats at any time.

No torch.
"""

from __future__ import annotations

import dataclasses
import time
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
    kernels: str
    """Whose operators run, and which build of them: `torch`, or `native` and a digest."""
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

    since_s: float = 0.0
    """CLOCK_MONOTONIC seconds of the engine's start; another value is another engine's."""
    num_waiting: int = 0
    num_prefilling: int = 0
    """Running and parked prefills."""
    num_decoding: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_cached: int = 0
    """Blocks that nobody uses, with content that a later prompt may share."""
    num_kv_blocks: int = 0
    pass_bytes: int = 0
    """Tensors that running and parked prefills hold beside their KV blocks."""
    num_decisions: int = 0
    num_wakeups: int = 0
    """Times the engine thread woke from waiting on its inbox."""
    decision_seconds_total: float = 0.0
    num_preemptions: int = 0
    num_evictions: int = 0
    """Times a request lost its KV blocks to a more urgent one."""
    num_slices: int = 0
    num_prefill_tokens: int = 0
    """Prompt tokens of requests that got their first token."""
    num_cached_tokens: int = 0
    """Those of them that were found in the KV cache."""
    num_generated_tokens: int = 0
    num_started: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_rejected: int = 0
    num_failed: int = 0

    def to_wire(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> EngineStats:
        return EngineStats(**wire)


@dataclass
class EngineCounters:
    """What an engine counts since its start.

    Each field has one thread that writes it, so stats() may read at any time.
    """

    since_s: float = field(default_factory=time.monotonic)
    wakeups: int = 0
    decision_s: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    timed_out: int = 0
    failed: int = 0

    def stats(self, **gauges: int) -> EngineStats:
        """These counters beside `gauges` and counters that others keep."""
        return EngineStats(
            since_s=self.since_s,
            num_wakeups=self.wakeups,
            decision_seconds_total=self.decision_s,
            num_prefill_tokens=self.prefill_tokens,
            num_cached_tokens=self.cached_tokens,
            num_generated_tokens=self.generated_tokens,
            num_started=self.started,
            num_finished=self.finished,
            num_cancelled=self.cancelled,
            num_rejected=self.rejected + self.timed_out,
            num_failed=self.failed,
            **gauges,
        )
