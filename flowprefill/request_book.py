"""RequestBook: requests of one engine from their submission to their one end.

Whatever ends a request goes through here, so that exactly one output of it has a finish_reason:
its last token, a cancel, a failure, a rejection, or the queue timeout, which has a thread of its
own. Knows neither scheduler nor model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowprefill.admission import Admission
from flowprefill.clock import Clock
from flowprefill.errors import (
    FlowPrefillError,
    InfeasibleError,
    InvalidParameterError,
    QueueTimeoutError,
)
from flowprefill.executor.sampler import Sampled, SamplingState
from flowprefill.kv.block_table import BlockTable
from flowprefill.request import FinishReason, PrefillTiming, Request, TokenOutput
from flowprefill.retry_after import with_retry_after
from flowprefill.stats import EngineCounters
from flowprefill.waiting_room import WaitingRoom


@dataclass
class LiveRequest:
    """A request inside the engine."""

    request: Request
    sampling: SamplingState
    put_s: float
    """When it entered the inbox."""
    prefix_keys: tuple[bytes, ...] = ()
    """Keys of the prompt's full KV blocks."""
    has_started: bool = False
    """Its first prefill has had the device: it waits no longer, even if it is evicted."""
    first_slice_s: float | None = None
    """When its first slice began."""
    blocking_s: float | None = None
    """See PrefillTiming."""
    table: BlockTable | None = None
    """While it holds KV blocks."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and what was generated so far."""
        return [*self.request.prompt_token_ids, *self.sampling.output_token_ids]


class RequestBook:
    """Who is there, and what they are told. The engine thread's, but for admit() and timeouts."""

    def __init__(
        self,
        admission: Admission,
        queue_timeout_ms: float,
        clock: Clock,
        counters: EngineCounters,
        on_output: Callable[[TokenOutput], None],
        on_timeout: Callable[[int], None],
        num_preemptions: Callable[[int], int],
    ) -> None:
        """on_timeout(req_id): a waiting request was ended by the queue timeout; called on that
        thread, must return at once. num_preemptions(req_id): those of a live request so far."""
        self.live: dict[int, LiveRequest] = {}
        """What the engine thread has taken in."""
        self._unfinished: set[int] = set()  # admitted and not yet ended
        self._queue_timeout_ms = queue_timeout_ms
        self._clock = clock
        self._counters = counters
        self._on_output = on_output
        self._on_timeout = on_timeout
        self._num_preemptions = num_preemptions
        self._waiting_room = WaitingRoom(admission, clock, self._time_out)

    def admit(self, request: Request, prefill_s: float) -> None:
        """Note a request that is handed over; callers share a lock.

        Raises QueueFullError, or InvalidParameterError if its id is in use.
        """
        if request.req_id in self._unfinished:
            raise InvalidParameterError("req_id", request.req_id, "no live request's")
        num_tokens = len(request.prompt_token_ids)
        self._waiting_room.admit(request.req_id, num_tokens, request.arrival_s, prefill_s)
        self._unfinished.add(request.req_id)
        self._counters.started += 1

    def take_in(self, live: LiveRequest) -> bool:
        """An admitted request reaches the engine thread. False if it was timed out before."""
        req_id = live.request.req_id
        if req_id not in self._waiting_room:
            self.forget(req_id)
            return False
        self.live[req_id] = live
        return True

    def start(self, req_id: int) -> bool:
        """It gets the device. False if it was timed out in the moment before."""
        live = self.live[req_id]
        live.has_started = live.has_started or self._waiting_room.leave(req_id)
        return live.has_started

    def give_token(
        self, req_id: int, sampled: Sampled, now_s: float, prefill: PrefillTiming | None = None
    ) -> bool:
        """Send one token, the first one with its `prefill`. True if the request ended with it."""
        state = self.live[req_id].sampling
        state.output_token_ids.append(sampled.token_id)
        reason = state.finish_reason(sampled.token_id)
        self._counters.generated_tokens += 1
        if reason:
            self._counters.finished += 1
            self.forget(req_id)
        self._on_output(
            TokenOutput(
                req_id=req_id,
                token_id=sampled.token_id,
                finish_reason=reason,
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
                num_preemptions=self._num_preemptions(req_id),
                token_s=now_s,
                prefill=prefill,
            )
        )
        return reason is not None

    def cancel(self, req_id: int) -> None:
        if self._end(req_id, FinishReason.CANCELLED):
            self._counters.cancelled += 1

    def reject(self, req_id: int, message: str) -> None:
        """Nothing can be done for it in time."""
        if self._end(req_id, FinishReason.ERROR, InfeasibleError(message)):
            self._counters.rejected += 1

    def fail(self, req_id: int, error: FlowPrefillError) -> None:
        if self._end(req_id, FinishReason.ERROR, error):
            self._counters.failed += 1

    def fail_all(self, error: FlowPrefillError) -> None:
        """Also those that were not taken in yet."""
        for req_id in sorted(self._unfinished):
            self.fail(req_id, error)

    def forget(self, req_id: int) -> None:
        """It has its end; its id may be used again."""
        self.live.pop(req_id, None)
        self._unfinished.discard(req_id)

    def close(self) -> None:
        """No timeouts any more."""
        self._waiting_room.close()

    def _time_out(self, req_id: int) -> None:
        """Answer a request that waited too long. The engine thread forgets it when it can."""
        self._counters.timed_out += 1
        self._on_timeout(req_id)
        message = f"the request did not start within queue_timeout_ms={self._queue_timeout_ms:g}"
        message = with_retry_after(message, self._waiting_room.waiting_prefill_s)
        self._send_end(req_id, FinishReason.ERROR, QueueTimeoutError(message))

    def _end(
        self, req_id: int, reason: FinishReason, error: FlowPrefillError | None = None
    ) -> bool:
        """End a request without a token. False if the queue timeout has answered it already."""
        live = self.live.get(req_id)
        has_started = live is not None and live.has_started
        if not has_started and not self._waiting_room.leave(req_id):
            return False
        self.forget(req_id)
        self._send_end(req_id, reason, error)
        return True

    def _send_end(self, req_id: int, reason: FinishReason, error: FlowPrefillError | None) -> None:
        self._on_output(
            TokenOutput(
                req_id=req_id,
                finish_reason=reason,
                error_code=error.code if error else None,
                error_message=str(error) if error else None,
                num_preemptions=self._num_preemptions(req_id),
                token_s=self._clock.now_s(),
                reject_reason=error.reject_reason if error else None,
            )
        )
