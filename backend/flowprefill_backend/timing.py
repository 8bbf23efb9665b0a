"""The times of one request, from execute() to its last response. Knows no server and no text."""

from __future__ import annotations

from typing import Any

from flowprefill.request import SLO, PrefillTiming, TokenOutput


class RequestTiming:
    """What is known of one request's times; all of it from the same monotonic clock.

    Written on the request's sender lane only.
    """

    def __init__(self, arrival_s: float, slo: SLO) -> None:
        """arrival_s: CLOCK_MONOTONIC seconds at which the backend got the request"""
        self.slo = slo
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        """When the first token was ready to be sent; None before."""
        self.prefill: PrefillTiming | None = None
        """None before the first token."""
        self.num_output_tokens = 0
        self.gap_s: float | None = None
        """Between the last token and the one before; None before the second token."""
        self._last_token_s = 0.0
        self._num_preemptions = 0

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the moment in which the first token was ready to be sent; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """Arrival to its first slice on the device; None without a token."""
        return self.prefill.started_s - self.arrival_s if self.prefill else None

    @property
    def is_on_time(self) -> bool:
        """The first token met its objective."""
        return self.ttft_s is not None and self.ttft_s <= self.slo.ttft_s

    def age_s(self, now_s: float) -> float:
        """Since its arrival."""
        return now_s - self.arrival_s

    def note(self, output: TokenOutput, now_s: float) -> None:
        """Take an output of the engine that is about to be answered."""
        self._num_preemptions = max(self._num_preemptions, output.num_preemptions)
        self.prefill = output.prefill or self.prefill
        if output.token_id is not None:
            self.num_output_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = now_s
            else:
                self.gap_s = now_s - self._last_token_s
            self._last_token_s = now_s

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """The `timing` output of a request that ends now; None for what it never came to."""
        prefill = self.prefill
        return {
            "queue_s": _round(self.queue_s),
            "prefill_s": _round(prefill.device_s if prefill else None),
            "blocking_s": _round(prefill.blocking_s if prefill else None),
            "ttft_s": _round(self.ttft_s),
            "e2e_s": _round(self.age_s(now_s)),
            "num_preemptions": self._num_preemptions,
            "num_cached_tokens": prefill and prefill.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "slo_class": self.slo.name or None,
            "ttft_slo_ms": self.slo.ttft_s * 1000,
            "is_on_time": self.is_on_time,
        }


def _round(value_s: float | None) -> float | None:
    """To the microsecond."""
    return None if value_s is None else round(value_s, 6)
