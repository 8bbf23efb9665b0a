"""RequestCounts: what a request's arrival, tokens and end mean for the metrics.

Called on the threads that serve requests, so it only notes; nothing here talks to the server.
"""

from __future__ import annotations

import threading
from collections import Counter

from flowprefill.errors import FlowPrefillError, RequestCancelledError
from flowprefill_backend.answer import Answer
from flowprefill_backend.metric_families import (
    CANCELLED,
    FAILED,
    FINISHED,
    JUDGED,
    NO_CLASS,
    ON_TIME,
    REJECTED,
    STARTED,
    UNKNOWN_CLASS,
)

Series = tuple[str, ...]
"""Name of a family and values of its labels."""


class Tally:
    """Counts and observations since they were last taken. Any thread adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Series] = Counter()
        self._observations: list[tuple[Series, float]] = []
        self._is_closed = False

    def close(self) -> None:
        """Nobody takes any more: nothing is kept."""
        with self._lock:
            self._is_closed = True
            self._counts, self._observations = Counter(), []

    def add(self, counts: dict[Series, int], observations: list[tuple[Series, float]]) -> None:
        """All or nothing of it is in what is taken next."""
        with self._lock:
            if not self._is_closed:
                self._counts.update(counts)
                self._observations += observations

    def take(self) -> tuple[Counter[Series], list[tuple[Series, float]]]:
        with self._lock:
            taken = self._counts, self._observations
            self._counts, self._observations = Counter(), []
            return taken


class RequestCounts:
    """Each request is begun once and ended once, whatever becomes of it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def begin(self) -> None:
        self._tally.add({(STARTED,): 1}, [])

    def token(self, answer: Answer) -> None:
        """A token was added to the answer."""
        counts: dict[Series, int] = {("vllm:generation_tokens_total",): 1}
        gap_s = answer.timing.gap_s
        if gap_s is not None:
            self._tally.add(counts, [(("vllm:time_per_output_token_seconds",), gap_s)])
            return
        counts[("vllm:prompt_tokens_total",)] = answer.num_input_tokens
        self._tally.add(counts, _first_token(answer))

    def end(self, error: Exception | None, answer: Answer | None, now_s: float) -> None:
        """error: None = answered in full. answer: None = the request was not parsed. now_s:
        CLOCK_MONOTONIC seconds."""
        counts: dict[Series, int] = {_outcome(error, answer): 1}
        on_time = _is_on_time(error, answer, now_s)
        if on_time is not None:
            slo_class = _class(answer)
            counts[(JUDGED, slo_class)] = 1
            counts[(ON_TIME, slo_class)] = int(on_time)
        observations: list[tuple[Series, float]] = []
        if error is None and answer is not None:
            observations = [
                (("vllm:e2e_request_latency_seconds",), answer.timing.age_s(now_s)),
                (("vllm:request_prompt_tokens",), answer.num_input_tokens),
                (("vllm:request_generation_tokens",), answer.num_tokens),
                (("vllm:request_params_best_of",), 1),
                (("vllm:request_params_n",), 1),
            ]
        self._tally.add(counts, observations)


def _first_token(answer: Answer) -> list[tuple[Series, float]]:
    timing, slo_class = answer.timing, _class(answer)
    assert timing.ttft_s is not None, "it has its first token"
    found: list[tuple[Series, float]] = [
        (("vllm:time_to_first_token_seconds",), timing.ttft_s),
        (("flowprefill_time_to_first_token_seconds", slo_class), timing.ttft_s),
    ]
    prefill = timing.prefill
    if prefill is None or timing.queue_s is None:
        return found
    found.append((("flowprefill_queue_seconds", slo_class), timing.queue_s))
    if prefill.blocking_s is not None:
        found.append((("flowprefill_blocking_seconds",), prefill.blocking_s))
    error = abs(prefill.predicted_s / prefill.device_s - 1)  # a pass takes time
    found.append((("flowprefill_prefill_prediction_error_ratio",), error))
    return found


def _outcome(error: Exception | None, answer: Answer | None) -> Series:
    if error is None:
        return (FINISHED,)
    if isinstance(error, RequestCancelledError):
        return (CANCELLED,)
    reason = error.reject_reason if isinstance(error, FlowPrefillError) else None
    has_token = answer is not None and answer.num_tokens > 0
    if reason is None or has_token:  # what was cut short was no refusal
        return (FAILED,)
    return (REJECTED, reason)


def _is_on_time(error: Exception | None, answer: Answer | None, now_s: float) -> bool | None:
    """Whether the first token was in time; None where that cannot be said: the request was no
    valid one, or its client left before the token was due."""
    is_cancelled = isinstance(error, RequestCancelledError)
    if isinstance(error, FlowPrefillError) and error.reject_reason in ("invalid", "unsupported"):
        return None
    if answer is None:
        return None if is_cancelled else False
    if is_cancelled and answer.timing.ttft_s is None:
        return False if answer.timing.age_s(now_s) > answer.timing.slo.ttft_s else None
    return answer.timing.is_on_time and (error is None or is_cancelled)


def _class(answer: Answer | None) -> str:
    if answer is None:
        return UNKNOWN_CLASS
    return answer.timing.slo.name or NO_CLASS
