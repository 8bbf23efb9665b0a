"""Recordings of what the engine runs, for clients that ask: one at a time, sent part by part.

The engine says what its device did. Who the requests are is known here, their clients' ids among
it. While nobody records, a request's end costs one look more.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from flowprefill.errors import FlowPrefillError, UnavailableError
from flowprefill.timeline import RequestSpan
from flowprefill_backend.live import LiveRequest, LiveRequests
from flowprefill_backend.response import error_response, text_response

PART_S = 0.5
"""From part to part. A part is put together in a few milliseconds, which requests feel."""
MAX_ENDED = 20_000
"""Ended requests of one recording."""


class Engine(Protocol):
    """What is used of EngineClient."""

    def take_timeline(self, goes_on: bool) -> tuple[list[Any], bool]: ...


class Timelines:
    """Begins and ends recordings. Its methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        requests: LiveRequests,
        facts: dict[str, Any],
        send: Callable[[LiveRequest, Any, bool], None],
    ) -> None:
        """facts: what a recording says of the engine. send(live, response, is_last): answer the
        request that asked for it."""
        self._engine = engine
        self._requests = requests
        self._facts = facts
        self._send = send
        self._lock = threading.Lock()
        self._running: _Recording | None = None
        self._is_closed = False

    def begin(self, live: LiveRequest, seconds: float) -> None:
        """Record for `live`. Raises UnavailableError while another recording runs."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is stopping")
            if self._running is not None:
                raise UnavailableError("a timeline is being recorded already; one at a time")
            recording = self._running = _Recording(live, seconds)
        name = "timeline"
        threading.Thread(target=self._record, args=(recording,), name=name, daemon=True).start()

    @property
    def is_recording(self) -> bool:
        return self._running is not None

    def end(self, why: str = "asked") -> bool:
        """End the recording that runs, which is answered in full. False if none runs."""
        with self._lock:
            if self._running is None:
                return False
            self._running.end(why)
            return True

    def close(self) -> None:
        """End what runs, and record no more."""
        with self._lock:
            self._is_closed = True
        self.end("stopping")

    def note_end(self, live: LiveRequest, error: Exception | None) -> None:
        """The request is about to get its last response; error: why it is no answer in full."""
        if (recording := self._running) is not None:
            recording.add_ended(_span(live, time.monotonic(), _outcome(error)))

    def _record(self, recording: _Recording) -> None:
        """On a thread of its own."""
        live = recording.live
        try:
            self._engine.take_timeline(False)  # one that failed may have been left
            self._engine.take_timeline(True)
            self._send(live, text_response(json.dumps(recording.part([], [], self._facts))), False)
            while not self._take_part(recording):
                pass
        except Exception as error:  # whatever it is, this client must hear of it
            self._finish()
            self._send(live, error_response(error, live.names_error_code), True)

    def _take_part(self, recording: _Recording) -> bool:
        """Wait for the next part and send it. True if it was the last."""
        recording.wait(PART_S)
        is_last = bool(recording.why_over)
        runs, is_full = self._engine.take_timeline(not is_last)
        if is_full:
            recording.end("full")
        spans = [_span(live) for live in self._requests.all()]
        part = recording.part(runs, spans)
        if is_last:
            self._finish()
        self._send(recording.live, text_response(json.dumps(part)), is_last)
        return is_last

    def _finish(self) -> None:
        with self._lock:
            self._running = None


class _Recording:
    """One client's."""

    def __init__(self, live: LiveRequest, seconds: float) -> None:
        self.live = live
        self.why_over = ""
        """See Timeline.end; "" while it runs. Looked at by the recording thread."""
        self._asked_end = ""
        self._is_ended = threading.Event()
        self._sent_s = time.monotonic()
        self._end_s = self._sent_s + seconds
        self._ended: list[RequestSpan] = []
        """Not sent yet."""
        self._num_ended_sent = 0

    def end(self, why: str) -> None:
        """From any thread; the first one says why."""
        self._asked_end = self._asked_end or why
        self._is_ended.set()

    def add_ended(self, span: RequestSpan | None) -> None:
        if span is not None:
            self._ended.append(span)
            if self._num_ended_sent + len(self._ended) >= MAX_ENDED:
                self.end("full")

    def wait(self, seconds: float) -> None:
        """So long, or until it is over."""
        self._is_ended.wait(min(seconds, max(0.0, self._end_s - time.monotonic())))
        if not self._is_ended.is_set():
            if time.monotonic() >= self._end_s:
                self.end("time")
            elif self.live.is_client_gone():
                self.end("asked")
        self.why_over = self._asked_end

    def part(
        self,
        runs: list[Any],
        spans: list[RequestSpan | None],
        facts: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What has happened since the last one. Its requests: those that are live, `spans`, and
        those that have ended."""
        from_s, self._sent_s = self._sent_s, time.monotonic()
        ended = self._ended[:]
        del self._ended[: len(ended)]  # others may have been added meanwhile
        self._num_ended_sent += len(ended)
        # The ended ones last: one that is among both has just ended.
        known = [span.to_wire() for span in (*spans, *ended) if span is not None]
        return {
            "from_s": from_s,
            "to_s": self._sent_s,
            "facts": facts,
            "runs": runs,
            "requests": known,
            "end": self.why_over,
        }


def _span(live: LiveRequest, end_s: float = math.inf, outcome: str = "") -> RequestSpan | None:
    """What is known of a request; None while it is being parsed."""
    answer = live.answer
    if answer is None:
        return None
    timing = answer.timing
    return RequestSpan(
        req_id=live.req_id,
        slo_class=timing.slo.name,
        num_tokens=answer.num_input_tokens,
        arrival_s=timing.arrival_s,
        first_token_s=math.inf if timing.first_token_s is None else timing.first_token_s,
        deadline_s=timing.arrival_s + timing.slo.ttft_s,
        client_id=live.triton_id,
        end_s=end_s,
        outcome=outcome,
        num_cached_tokens=timing.prefill.num_cached_tokens if timing.prefill else 0,
        num_output_tokens=timing.num_output_tokens,
    )


def _outcome(error: Exception | None) -> str:
    if error is None:
        return "finished"
    return error.code if isinstance(error, FlowPrefillError) else "INTERNAL"
