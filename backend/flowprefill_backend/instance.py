"""One loaded model: carries requests from execute() to the engine, and its outputs to the clients.

Threads: execute() only copies and posts. Parser threads check and tokenise, shortest text first.
The engine client's thread only posts. Each request has one sender lane, on which its whole answer
is built and sent in order. The cancel poller and control requests cancel; the lane then ends the
request. Whatever fails on the way ends in `_fail`, so every request gets its FINAL.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from flowprefill.config import EngineConfig
from flowprefill.errors import FlowPrefillError, RequestCancelledError, UnavailableError
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.answer import Answer
from flowprefill_backend.cancel_poller import CancelPoller
from flowprefill_backend.live import LiveRequest, LiveRequests
from flowprefill_backend.request import Control, RawRequest, control, parse, read
from flowprefill_backend.response import error_response, part_response, text_response
from flowprefill_backend.workers import Job, Workers

NUM_PARSERS = 2
NUM_SENDERS = 4
CLOSE_TIMEOUT_S = 5.0
"""The server waits for finalize() without limit, so each part of it gets one."""


class EngineLike(Protocol):
    """What is used of EngineClient."""

    def start(self, on_progress: Callable[[str, float], None]) -> EngineInfo: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, req_id: int) -> None: ...

    def stats(self) -> EngineStats: ...

    @property
    def is_healthy(self) -> bool: ...

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
        checks_health: bool = False,
    ) -> None:
        """Start the engine and wait until it is ready.

        `make_engine` gets the callback for outputs. With `checks_health`, requests that arrive
        while the engine is down are refused instead of waiting for its restart.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._log = log
        self._checks_health = checks_health
        self._is_closing = False
        self._req_ids = itertools.count(1)
        self._live = LiveRequests()
        self._engine = make_engine(self._on_output)
        self.info = self._engine.start(LoadProgress(log))
        on_error = self._log_bug
        self._parsers = Workers("parser", NUM_PARSERS, on_error)
        self._senders = [Workers(f"sender-{i}", 1, on_error) for i in range(NUM_SENDERS)]
        self._stats_reader = Workers("stats-reader", 1, on_error)
        self._poller = CancelPoller(config.cancel_poll_ms / 1000, self._cancel, on_error)

    def execute(self, requests: list[Any]) -> None:
        """Take over pb_utils.InferenceRequests; returns before anything is parsed."""
        arrival_s = time.monotonic()
        for request in requests:
            self._accept(request, arrival_s)

    def close(self) -> None:
        """End within bounds: what is live fails as unavailable, then the engine is closed."""
        self._is_closing = True
        self._poller.close(CLOSE_TIMEOUT_S)
        self._parsers.close(CLOSE_TIMEOUT_S)
        for live in self._live.all():
            self._post(live, partial(self._fail, live, UnavailableError("the model is unloading")))
        # Once the server runs finalize(), a send() may block for ever: its threads are left behind.
        for workers in (*self._senders, self._stats_reader):
            workers.close(CLOSE_TIMEOUT_S / NUM_SENDERS)
        self._engine.close(drain_s=0.0)

    def _accept(self, request: Any, arrival_s: float) -> None:
        sender = request.get_response_sender()
        live = LiveRequest(next(self._req_ids), str(request.request_id()), sender)
        try:
            raw = read(request, arrival_s)
            live.names_error_code = raw.names_error_code
            command = control(raw)
            if command is None and self._checks_health and not self._engine.is_healthy:
                raise UnavailableError("Model is unavailable due to unhealthy engine")
        except Exception as error:  # whatever it is, this client must hear of it
            self._post(live, partial(self._fail, live, error))
            return
        if command is not None:
            self._obey(live, command)
            return
        self._live.add(live)
        self._poller.watch(live)
        num_bytes = sum(map(len, raw.inputs.get("text_input", ())))
        self._parsers.post(partial(self._parse_and_submit, live, raw), order=num_bytes)

    def _parse_and_submit(self, live: LiveRequest, raw: RawRequest) -> None:
        """On a parser thread."""
        try:
            if self._is_closing:
                raise UnavailableError("the model is unloading")
            if live.is_over:
                return
            parsed = parse(raw, self._config, self.info, self._tokenizer)
            num_tokens = len(parsed.prompt_token_ids)
            live.answer = Answer(
                parsed.options, parsed.prompt, num_tokens, parsed.sampling, self._tokenizer
            )
            request = Request(
                live.req_id, parsed.prompt_token_ids, parsed.sampling, parsed.slo, raw.arrival_s
            )
            live.submit(self._engine.submit, request)
        except Exception as error:  # whatever it is, this client must hear of it
            self._post(live, partial(self._fail, live, error))

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
            if not isinstance(error, FlowPrefillError):
                self._log_bug(error)
            self._fail(live, error)
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
        if reason is not None:
            self._close(live, part_response(answer.take(reason), answer.options))
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

    def _obey(self, live: LiveRequest, command: Control) -> None:
        """Answer a control request; it is never live itself, so nothing can cancel it."""
        if command.cancel_id is None:
            self._stats_reader.post(partial(self._send_stats, live))
            return
        target = self._live.latest(command.cancel_id)
        is_cancelled = target is not None and self._cancel(target)
        response = text_response("cancelled" if is_cancelled else "not found")
        self._post(live, partial(self._close, live, response))

    def _send_stats(self, live: LiveRequest) -> None:
        """On its own thread: the engine may take its time to answer."""
        try:
            response = text_response(json.dumps(self._engine.stats().to_wire()))
        except Exception as error:  # whatever it is, this client must hear of it
            response = error_response(error, live.names_error_code)
        self._post(live, partial(self._close, live, response))

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        self._close(live, error_response(error, live.names_error_code))

    def _close(self, live: LiveRequest, response: Any) -> None:
        self._live.discard(live)
        live.close(response)

    def _post(self, live: LiveRequest, job: Job) -> None:
        self._senders[live.req_id % NUM_SENDERS].post(job)

    def _log_cancelled(self) -> None:
        self._log.log_info("[flowprefill] Successfully cancelled the request")

    def _log_bug(self, error: Exception) -> None:
        self._log.log_error(f"[flowprefill] unexpected {type(error).__name__}: {error}")


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
    return error
