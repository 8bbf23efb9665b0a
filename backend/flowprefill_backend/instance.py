"""One loaded model: carries requests from execute() to the engine, and its outputs to the clients.

Threads: execute() only copies and posts; the two of Intake parse and submit. The engine client's
thread only posts. Each request has one sender lane, on which its whole answer is built and sent in
order. The cancel poller and control requests cancel; the lane then ends the request. Whatever fails
on the way ends in `_fail`, so every request gets its FINAL.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from flowprefill.config import EngineConfig
from flowprefill.engine_process import EngineState
from flowprefill.errors import (
    FlowPrefillError,
    RequestCancelledError,
    UnavailableError,
    shorten,
)
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.cancel_poller import CancelPoller
from flowprefill_backend.claim import Claim
from flowprefill_backend.controls import Controls
from flowprefill_backend.health import HealthCheck
from flowprefill_backend.intake import MAX_WAITING, MAX_WAITING_BYTES, Intake
from flowprefill_backend.live import LiveRequest, LiveRequests
from flowprefill_backend.metrics import Metrics
from flowprefill_backend.metrics_page import MetricsPage
from flowprefill_backend.request import control, read, screen
from flowprefill_backend.request_counts import RequestCounts, Tally
from flowprefill_backend.response import MAX_ERROR_CHARS, error_response, part_response
from flowprefill_backend.timeline import Timelines
from flowprefill_backend.unload_watch import UNLOADING_MESSAGE
from flowprefill_backend.workers import Job, Worker

NUM_SENDERS = 4
STOPPING_MESSAGE = "the server is stopping"
MAX_LOGGED_FRAMES = 20
CLOSE_TIMEOUT_S = 5.0
"""The server waits for finalize() without limit, so each part of it gets one."""


class EngineLike(Protocol):
    """What is used of EngineClient."""

    def start(self, on_progress: Callable[[str, float], None]) -> EngineInfo: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, req_id: int) -> None: ...

    def stats(self) -> EngineStats: ...

    def take_timeline(self, goes_on: bool) -> tuple[list[Any], bool]: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def num_restarts(self) -> int: ...

    def close(self, drain_s: float = 0.0) -> None: ...


class Log(Protocol):
    """pb_utils.Logger."""

    def log_info(self, message: str) -> None: ...

    def log_warn(self, message: str) -> None: ...

    def log_error(self, message: str) -> None: ...


class Instance:
    """Serves the requests of one model with one engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        make_engine: Callable[[Callable[[TokenOutput], None]], EngineLike],
        log: Log,
        unload: Callable[[], object] | None = None,
        make_page: Callable[[EngineInfo], MetricsPage | None] = lambda info: None,
        claim: Claim | None = None,
    ) -> None:
        """Start the engine and wait until it is ready.

        `make_engine` gets the callback for outputs. With `unload`, requests that arrive while the
        engine is down are refused instead of waiting for its restart, and if it has failed for good
        `unload` is called, once. `make_page` may give a page for the model's metrics. `claim` tells
        whether the model was loaded anew; None: that cannot be known.
        """
        self._tokenizer = tokenizer
        self._log = log
        self._req_ids = itertools.count(1)
        self._live = LiveRequests()
        self._engine = make_engine(self._on_output)
        self.info = self._engine.start(LoadProgress(log))
        self._claim = claim
        self._take_claim()
        on_error, engine, info = self._log_bug, self._engine, self.info
        self._intake = Intake(config, tokenizer, info, engine, self._post_failure, on_error)
        self._senders = [Worker(f"sender-{i}", on_error) for i in range(NUM_SENDERS)]
        self._asker = Worker("asker", on_error, MAX_WAITING, MAX_WAITING_BYTES)
        self._health = HealthCheck(engine, unload, self._asker, log)
        self._poller = CancelPoller(config.cancel_poll_ms / 1000, self._cancel, on_error)
        facts = {
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "policy": config.policy,
            "granularity": config.granularity,
        }
        self._timelines = Timelines(engine, self._live, facts, self._send_timeline)
        self._controls = Controls(
            engine, self._live, self._timelines, self._cancel, self._post_last, self._asker
        )
        tally = Tally()
        self._counts = RequestCounts(tally)
        page = make_page(self.info)
        self._metrics: Metrics | None = None
        if page is None:
            tally.close()
        else:
            self._metrics = Metrics(
                page, tally, engine, info, self._num_unparsed, on_error, lambda: self.is_replaced
            )

    def execute(self, requests: list[Any]) -> None:
        """Take over pb_utils.InferenceRequests; returns before anything is parsed."""
        arrival_s = time.monotonic()
        for request in requests:
            self._accept(request, arrival_s)

    @property
    def has_live(self) -> bool:
        """Whether a request still owes its client an end, or a recording its."""
        return bool(self._live.all()) or self._timelines.is_recording

    @property
    def is_replaced(self) -> bool:
        """Whether the model was loaded anew since: this instance gets no more requests."""
        return self._claim is not None and self._claim.is_lost

    def refuse_new(self, reason: str = STOPPING_MESSAGE) -> None:
        """From now on every request is answered UNAVAILABLE; those that run go on."""
        self._live.refuse_new(reason)
        self._timelines.close()

    def drain(self, timeout_s: float, reason: str = STOPPING_MESSAGE) -> int:
        """Where no more come: let what runs finish, and fail after `timeout_s` what still does.

        Returns, once all answers have been handed to the server, how many were cut short so.
        """
        self._timelines.end("stopping")
        self._live.wait_empty(timeout_s)
        cut_short: list[int] = []
        for live in self._live.all():
            self._post(live, partial(self._cut_short, live, reason, cut_short))
        lanes_end = [threading.Event() for _ in self._senders]
        for sender, lane_end in zip(self._senders, lanes_end, strict=True):
            sender.post(lane_end.set)
        for lane_end in lanes_end:
            lane_end.wait()
        return len(cut_short)

    def close(self) -> None:
        """End within bounds: what is live fails as unavailable, then the engine is closed."""
        self._timelines.close()
        self._poller.close(CLOSE_TIMEOUT_S)
        self._intake.close(CLOSE_TIMEOUT_S)
        for live in self._live.all():
            self._post_failure(live, UnavailableError(UNLOADING_MESSAGE))
        # Once the server runs finalize(), a send() may block for ever: its threads are left behind.
        for worker in (*self._senders, self._asker):
            worker.close(CLOSE_TIMEOUT_S / NUM_SENDERS)
        if self._metrics:  # behind the last ends, and while the engine can still be asked
            self._metrics.close(CLOSE_TIMEOUT_S)
        self._engine.close(drain_s=0.0)

    def _accept(self, request: Any, arrival_s: float) -> None:
        live = LiveRequest(next(self._req_ids), request.get_response_sender())
        command = None
        try:
            raw = read(request, arrival_s)
            live.triton_id, live.names_error_code = raw.triton_id, raw.names_error_code
            screen(raw, self.info, self._tokenizer)
            command = control(raw)
            if command is not None:
                self._controls.obey(live, command)
            else:
                self._begin(live)
                self._health.check()
                self._live.add(live)
                self._poller.watch(live)
                self._intake.take(live, raw)
        except Exception as error:  # whatever it is, this client must hear of it
            if command is None:
                self._begin(live)
            self._post_failure(live, error)

    def _take_claim(self) -> None:
        try:
            if self._claim is not None:
                self._claim.take()
        except OSError as error:  # the one before goes on as long as it likes
            self._log.log_warn(f"[flowprefill] no claim: {error}")

    def _begin(self, live: LiveRequest) -> None:
        if not live.is_counted:
            live.is_counted = True
            self._counts.begin()

    def _num_unparsed(self) -> int:
        return sum(live.answer is None for live in self._live.all())

    def _on_output(self, output: TokenOutput) -> None:
        """On the engine client's reader thread. Outputs of requests that ended here are dropped."""
        live = self._live.get(output.req_id)
        if live is not None:
            self._post(live, partial(self._advance, live, output))

    def _advance(self, live: LiveRequest, output: TokenOutput) -> None:
        """On the request's sender lane: one engine output becomes at most one response."""
        if live.is_closed:
            return
        try:
            self._respond(live, output)
        except Exception as error:  # whatever it is, this client must hear of it
            self._fail(live, error)
        finally:
            if live.is_closed and output.finish_reason is None:
                # Ended on this side, by a stop string or a failure: the engine would go on.
                self._engine.cancel(live.req_id)

    def _respond(self, live: LiveRequest, output: TokenOutput) -> None:
        answer = live.answer
        if output.finish_reason is FinishReason.ERROR:
            raise _engine_error(output)
        if output.finish_reason is FinishReason.CANCELLED and (
            answer is None or answer.options.stream or answer.num_tokens == 0
        ):
            raise RequestCancelledError("Request was cancelled")
        assert answer is not None, "the engine answered a request that was never submitted"
        reason = answer.add(output)
        if output.token_id is not None:
            self._counts.token(answer)
        if reason is not None:
            is_cancelled = reason is FinishReason.CANCELLED
            error = RequestCancelledError("with part of its text") if is_cancelled else None
            self._close(live, part_response(answer.take(reason), answer.options), error)
        elif answer.options.stream:
            live.send(part_response(answer.take(None), answer.options))

    def _cancel(self, live: LiveRequest) -> bool:
        """From any thread. Returns False if there was nothing left to cancel."""
        if not live.cancel():
            return False
        try:
            self._engine.cancel(live.req_id)
        finally:
            # Not left to the engine: it may be restarting, or never have heard of the request.
            cancelled = TokenOutput(live.req_id, finish_reason=FinishReason.CANCELLED)
            self._post(live, partial(self._advance, live, cancelled))
        self._log.log_info("[flowprefill] Cancelling the request")
        self._post(live, self._log_cancelled)
        return True

    def _send_timeline(self, live: LiveRequest, response: Any, is_last: bool) -> None:
        if is_last:
            self._post_last(live, response)
        else:
            self._post(live, partial(live.send, response))

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        if not isinstance(error, FlowPrefillError):
            self._log_bug(error)
        self._close(live, error_response(error, live.names_error_code), error)

    def _cut_short(self, live: LiveRequest, reason: str, cut_short: list[int]) -> None:
        """On the request's sender lane, so that it ends either way but once."""
        if not live.is_closed:
            cut_short.append(live.req_id)
            self._engine.cancel(live.req_id)
            self._fail(live, UnavailableError(reason))

    def _close(self, live: LiveRequest, response: Any, error: Exception | None = None) -> None:
        """Send the last response; error: why it is no answer in full."""
        is_first = not live.is_closed  # only this lane closes it
        if is_first and live.is_counted:
            self._timelines.note_end(live, error)
        self._live.discard(live)
        try:
            live.close(response)
        except Exception as failure:
            error = failure
            raise
        finally:
            if is_first and live.is_counted:
                self._counts.end(error, live.answer, time.monotonic())

    def _post_last(self, live: LiveRequest, response: Any) -> None:
        self._post(live, partial(self._close, live, response))

    def _post_failure(self, live: LiveRequest, error: Exception) -> None:
        self._post(live, partial(self._fail, live, error))

    def _post(self, live: LiveRequest, job: Job) -> None:
        self._senders[live.req_id % NUM_SENDERS].post(job)

    def _log_cancelled(self) -> None:
        self._log.log_info("[flowprefill] Successfully cancelled the request")

    def _log_bug(self, error: Exception) -> None:
        text = shorten(f"unexpected {type(error).__name__}: {error}", MAX_ERROR_CHARS)
        frames = "".join(traceback.format_tb(error.__traceback__, MAX_LOGGED_FRAMES))
        self._log.log_error(f"[flowprefill] {text}\n{frames}")


class LoadProgress:
    """Logs the stages of a load, each at most at every tenth of its way."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last = ("", -1)

    def __call__(self, stage: str, fraction: float) -> None:
        step = (stage, int(fraction * 10))
        if step != self._last:
            self._last = step
            self._log.log_info(f"[flowprefill] loading: {stage} {fraction:.0%}")


def _engine_error(output: TokenOutput) -> FlowPrefillError:
    error = FlowPrefillError(output.error_message or "the engine gave no reason")
    error.code = output.error_code or FlowPrefillError.code
    error.reject_reason = output.reject_reason
    return error
