"""EngineClient: the calls of Engine, with the engine in a child process that is supervised.

Knows neither models nor scheduling. One supervisor thread does everything that has an order: it
reads the engine's messages, delivers outputs, watches for death and wedge, restarts, ends what
waited too long for a restart, and closes. So a request's end is delivered once: only that thread
delivers, and only for ids that are live. `submit` and `cancel` use the channel, which never blocks.

With nothing live there are no timers: an idle engine and its client sleep.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import wait as wait_readable
from typing import Any

from flowprefill.config import EngineConfig
from flowprefill.engine_child import EngineChild
from flowprefill.errors import (
    EngineDeadError,
    FlowPrefillError,
    InfeasibleError,
    InvalidRequestError,
    ModelLoadError,
    QueueTimeoutError,
    UnavailableError,
)
from flowprefill.held_requests import HeldRequests
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill.supervision import (
    GAVE_UP,
    LoadWatch,
    ProgressWatch,
    RestartPlan,
    Supervision,
)
from flowprefill.suspects import Suspects
from flowprefill.wire import Kind, pack, unpack_error

DEFAULT_ENGINE = "flowprefill.engine:Engine"
CLOSE_GRACE_S = 3.0
EXIT_GRACE_S = 0.5
CLOSED_MESSAGE = "the engine was closed"
SUSPECT_MESSAGE = (
    "it died twice with this request and others in it, and takes these in one at a time"
)
_ENGINE_THREAD_REASONS = (None, InfeasibleError.reject_reason)
"""Of outputs that show that the engine's thread goes on. Others come of other threads: what is
refused at the door, and what has waited too long."""


class EngineState(str, enum.Enum):
    """What the engine process is doing."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # it died; new requests are held
    FAILED = "failed"  # it did not load, or died too often
    CLOSED = "closed"


class EngineClient:
    """An Engine in a child process. Its methods may be called from any thread, callbacks included
    (but `stats` and `take_timeline` not in on_output)."""

    def __init__(
        self,
        config: EngineConfig,
        on_output: Callable[[TokenOutput], None],
        on_log: Callable[[str], None],
        *,
        engine_factory: str = DEFAULT_ENGINE,
        supervision: Supervision | None = None,
    ) -> None:
        """Starts nothing yet.

        on_output: runs on the supervisor thread, which stands still meanwhile; must return soon.
        on_log: gets the engine's stdout and stderr line by line, and what happens to the process.
        """
        limits = supervision or Supervision()
        self._config = config
        self._on_output = on_output
        self._on_log = on_log
        self._engine_factory = engine_factory
        self._on_progress: Callable[[str, float], None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)
        self._loaded: Future[EngineInfo] = Future()
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)

        self._lock = threading.Lock()  # guards what follows; never held during a callback
        self._state = EngineState.STARTING
        self._why_not_ready = "the engine has not started"
        self._num_restarts = 0
        self._child: EngineChild | None = None
        self._live: dict[int, Request] = {}  # in the engine process, end not delivered
        self._held = HeldRequests(config)
        self._suspects = Suspects()
        self._watch = ProgressWatch(limits, config.max_slice_ms / 1000)
        self._questions: dict[int, Future[Any]] = {}  # to the engine process, by serial number
        self._serials = itertools.count()
        self._drain_s: float | None = None  # set by close()

        # of the supervisor thread alone
        self._restarts = RestartPlan(limits)
        self._load_watch = LoadWatch(limits)
        self._load_error: FlowPrefillError | None = None
        self._last_words: str | None = None  # of an engine that dies: why
        self._respawn_s: float | None = None
        self._close_deadline_s: float | None = None

    # ---- calls ----

    def start(self, on_progress: Callable[[str, float], None] | None = None) -> EngineInfo:
        """Start the engine process and wait until it has loaded.

        on_progress(stage, fraction) runs on the supervisor thread. A failed load raises what the
        engine raised (ConfigError, ModelLoadError, ...) and leaves no process; it is not retried.
        """
        with self._lock:
            if self._drain_s is not None:
                raise UnavailableError(CLOSED_MESSAGE)
            self._on_progress = on_progress
            self._thread.start()
        try:
            return self._loaded.result()
        except FlowPrefillError:
            self._thread.join()
            raise

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; valid after `start`."""
        return self._loaded.result(timeout=0)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def num_restarts(self) -> int:
        """Engines that replaced a dead one and were loaded."""
        return self._num_restarts

    @property
    def is_healthy(self) -> bool:
        """Whether a request would go to a running engine now; False during a restart."""
        return self._drain_s is None and self._state is EngineState.READY

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        child = self._child
        return child.pid if child else None

    def submit(self, request: Request) -> None:
        """Hand a request over; outputs follow through on_output. Never blocks.

        During a restart, or where Suspects says so, it is held, until its queue timeout at most;
        then it ends UNAVAILABLE. Raises QueueFullError if too much is held; UnavailableError before
        `start`, after `close`, and when the engine failed for good; EngineKillerError for a request
        that killed the engine twice; InvalidRequestError for values that no wire can carry.
        """
        req_id = request.req_id
        packed = _pack_request(request)
        now_s = time.monotonic()
        with self._lock:
            assert req_id not in self._live and req_id not in self._held, f"{req_id} used twice"
            if self._drain_s is not None:
                raise UnavailableError("the engine is shutting down")
            if refusal := self._suspects.refusal(request, now_s):
                raise refusal
            if self._state not in (EngineState.READY, EngineState.RESTARTING):
                raise UnavailableError(self._why_not_ready)
            is_ready = self._state is EngineState.READY
            if is_ready and self._suspects.may_enter(request, now_s):
                needs_timer = not self._live
                self._send_request(request, packed, now_s)
            else:
                needs_timer = self._held.add(request, packed)
        if needs_timer:
            self._wake()

    def cancel(self, req_id: int) -> None:
        """End a request with CANCELLED. Unknown and finished ids are ignored."""
        with self._lock:
            if req_id in self._held:
                self._held.cancel(req_id)
                self._wake()
            elif req_id in self._live and self._child:
                self._child.channel.send(pack(Kind.CANCEL, req_id))

    def stats(self, timeout_s: float = 2.0) -> EngineStats:
        """Ask the engine for its statistics; answered also during a long slice.

        Raises UnavailableError without a ready engine or an answer in time. Not for use in
        on_output, which holds up the thread that receives the answer.
        """
        return EngineStats.from_wire(self._ask(Kind.STATS, None, timeout_s))

    def take_timeline(self, goes_on: bool, timeout_s: float = 2.0) -> tuple[list[Any], bool]:
        """As Engine.take_timeline, with the runs as DeviceRun.to_wire() gives them.

        An engine that is replaced takes its recording along. Raises as `stats` does.
        """
        runs, is_full = self._ask(Kind.TIMELINE, goes_on, timeout_s)
        return runs, is_full

    def close(self, drain_s: float = 0.0) -> None:
        """Let live requests run for `drain_s`, cancel the rest, end the engine process and reap it.

        Takes drain_s + a few seconds at most: then the process is killed. A second call waits for
        the first; a call from a callback returns at once.
        """
        with self._lock:
            is_first = self._drain_s is None
            if is_first:
                self._drain_s = drain_s
            was_started = self._thread.ident is not None
        self._wake()
        if was_started and threading.current_thread() is not self._thread:
            self._thread.join()
        if is_first and not self._thread.is_alive():  # never started, or ended by a failure before
            self._finalise(CLOSED_MESSAGE)

    def _ask(self, kind: Kind, body: Any, timeout_s: float) -> Any:
        """The engine process's answer to [serial number, body]."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._state is not EngineState.READY or self._child is None:
                raise UnavailableError(self._why_not_ready)
            serial = next(self._serials)
            self._questions[serial] = answer
            self._child.channel.send(pack(kind, [serial, body]))
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError as error:
            message = f"no {kind.value} from the engine in {timeout_s} s"
            raise UnavailableError(message) from error
        finally:
            with self._lock:
                self._questions.pop(serial, None)

    # ---- the supervisor thread ----

    def _run(self) -> None:
        reason = CLOSED_MESSAGE
        try:
            self._spawn()
            while self._child or self._respawn_s is not None:
                self._step()
        except Exception as error:  # a bug of ours must not leave requests hanging
            reason = f"supervision of the engine failed: {error!r}"
            self._log(traceback.format_exc())
        self._finalise(reason)

    def _step(self) -> None:
        child = self._child
        sources: list[Any] = [self._wake_end, child.channel] if child else [self._wake_end]
        readable: list[Any] = wait_readable(sources, self._timeout_s(time.monotonic()))
        for source in readable:
            if source is self._wake_end:
                self._wake_end.recv(4096)
            elif child:
                self._receive(child)
        now_s = time.monotonic()
        self._end_held(now_s)
        load_due_s = self._load_watch.due_s
        if self._drain_s is not None:
            self._advance_close(now_s, self._drain_s)
        elif self._respawn_s is not None:
            if now_s >= self._respawn_s:
                self._spawn()
        elif load_due_s is not None and now_s >= load_due_s:
            self._end_stuck(f"did not load within {self._load_watch.limit_s:.1f} s")
        elif self._live and now_s >= self._watch.next_ping_s:
            self._check_progress(now_s)

    def _timeout_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None = sleep until a message or a call comes."""
        with self._lock:
            ping_s = self._watch.next_ping_s if self._live else None
            calls_s = (self._held.next_due_s(), ping_s)
        times_s = (*calls_s, self._respawn_s, self._load_watch.due_s, self._close_deadline_s)
        due_s = [time_s for time_s in times_s if time_s is not None]
        return max(0.0, min(due_s) - now_s) if due_s else None

    def _spawn(self) -> None:
        self._respawn_s = None
        try:
            child = EngineChild(self._config, self._engine_factory, self._log)
        except OSError as error:
            self._on_death(f"engine process cannot be started: {error}")
            return
        self._load_watch.begin(time.monotonic())
        with self._lock:
            self._child = child

    def _receive(self, child: EngineChild) -> None:
        try:
            messages = child.channel.receive()
        except EOFError:
            self._on_death(f"engine process {child.pid} {child.end(EXIT_GRACE_S)}")
            return
        for kind, body in messages:
            self._handle(kind, body)

    def _handle(self, kind: Kind, body: Any) -> None:
        if kind is Kind.OUTPUT:
            self._deliver(TokenOutput.from_wire(body))
        elif kind is Kind.PONG:
            num_slices, slice_s = body
            self._watch.on_pong(num_slices, slice_s, time.monotonic())
        elif kind in (Kind.STATS, Kind.TIMELINE):
            serial, said = body
            with self._lock:
                answer = self._questions.pop(serial, None)
            if answer:
                answer.set_result(said)
        elif kind is Kind.PROGRESS:
            if self._on_progress and not self._loaded.done():
                self._on_progress(*body)
        elif kind is Kind.READY:
            self._on_ready(EngineInfo.from_wire(body))
        elif kind is Kind.LOAD_FAILED:
            self._load_error = unpack_error(body)  # the process ends now; its EOF does the rest

    def _on_ready(self, info: EngineInfo) -> None:
        now_s = time.monotonic()
        self._load_watch.end()
        self._restarts.note_ready(now_s)
        with self._lock:
            # in one go, so that a cancel finds each request either held or live
            ended = self._take_ended(now_s)
            self._state = EngineState.READY
            self._num_restarts += self._loaded.done()
            self._why_not_ready = SUSPECT_MESSAGE  # what is held now
            self._send_held(now_s)
        self._call_on_outputs(ended)
        if self._loaded.done():
            self._log("engine is ready again")
        else:
            self._load_watch.note_first(now_s)
            self._loaded.set_result(info)

    def _send_held(self, now_s: float) -> None:
        """All that may enter. With the lock held and a ready child."""
        for request, packed in self._held.take(lambda one: self._suspects.may_enter(one, now_s)):
            self._send_request(request, packed, now_s)

    def _send_request(self, request: Request, packed: bytes, now_s: float) -> None:
        """With the lock held and a ready child."""
        assert self._child is not None
        if not self._live:
            self._watch.begin(now_s)
        self._live[request.req_id] = request
        self._suspects.enter(request, now_s)
        self._child.channel.send(packed)

    def _deliver(self, output: TokenOutput) -> None:
        """Hand an output over, unless its request has ended before."""
        now_s = time.monotonic()
        with self._lock:
            request = self._live.get(output.req_id)
            if request is None:
                return
            if _is_of_death(output):  # _on_death ends it, once it is seen who was there
                self._last_words = str(output.error_message).partition("\n")[0]
                return
            if output.reject_reason in _ENGINE_THREAD_REASONS:
                self._watch.on_output(now_s)
            if (prefill := output.prefill) is not None:
                num_tokens = len(request.prompt_token_ids) - prefill.num_cached_tokens
                self._held.note_prefill(num_tokens, prefill.device_s)
            if output.finish_reason:
                del self._live[output.req_id]
                if output.reject_reason:
                    self._suspects.leave(request.req_id)
                else:
                    self._suspects.clear(request, now_s)
                self._send_held(now_s)
        self._call_on_output(output)

    def _on_death(self, reason: str) -> None:
        """The child is gone and reaped: end what was in it, then restart or give up."""
        load_error, self._load_error = self._load_error, None
        last_words, self._last_words = self._last_words, None
        if load_error:
            reason = f"engine cannot load: {load_error}"
        elif last_words:
            reason = f"{reason}: {last_words}"
        was_loaded = self._loaded.done()
        self._load_watch.end()
        with self._lock:
            self._child = None
            if was_loaded:
                self._state = EngineState.RESTARTING
            self._why_not_ready = f"{reason}; the engine restarts"
        if was_loaded and self._drain_s is None:
            self._note_suspects()
        num_lost = self._end_live(reason)
        if self._drain_s is not None:
            return
        self._log(f"{reason}; {num_lost} requests lost")
        backoff_s = self._restarts.backoff_after_death_s(time.monotonic())
        if not was_loaded:
            self._give_up(reason)
            self._loaded.set_exception(load_error or ModelLoadError(f"{reason} while it loaded"))
        elif backoff_s is None:
            self._give_up(f"{GAVE_UP}; last: {reason}")
        else:
            self._respawn_s = time.monotonic() + backoff_s
            self._log(f"engine restarts in {backoff_s:g} s")

    def _note_suspects(self) -> None:
        """Before what was in the engine is forgotten: look for the request that killed it."""
        now_s = time.monotonic()
        refused: list[TokenOutput] = []
        with self._lock:
            to_blame = self._suspects.on_death(self._live.values(), now_s)
            refusal = self._suspects.refusal(to_blame, now_s) if to_blame else None
            if refusal:
                copies = self._held.take(lambda one: bool(self._suspects.refusal(one, now_s)))
                refused = [_failed(copy.req_id, refusal) for copy, _ in copies]
        if to_blame:
            num_tokens = len(to_blame.prompt_token_ids)
            self._log(f"a request of {num_tokens} prompt tokens was there twice: refused from now")
        self._call_on_outputs(refused)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._state = EngineState.FAILED
            self._why_not_ready = f"the engine failed: {reason}"
        self._log(self._why_not_ready)

    def _check_progress(self, now_s: float) -> None:
        assert self._child is not None
        stalled_s = self._watch.on_ping_time(now_s)
        if stalled_s is None:
            self._child.channel.send(pack(Kind.PING))
        else:
            self._end_stuck(f"made no progress for {stalled_s:.1f} s")

    def _end_stuck(self, how: str) -> None:
        """The child lives and does nothing: end it, so that it is restarted."""
        child = self._child
        assert child is not None
        child.dump_stacks()
        child.end()
        self._on_death(f"engine process {child.pid} {how}")

    def _end_live(self, reason: str) -> int:
        """Everything in the engine process is lost. Returns the number of requests."""
        with self._lock:
            lost = sorted(self._live)
            self._live.clear()
            questions, self._questions = self._questions, {}
        for answer in questions.values():
            answer.set_exception(UnavailableError(reason))
        self._call_on_outputs([_failed(req_id, EngineDeadError(reason)) for req_id in lost])
        return len(lost)

    def _end_held(self, now_s: float) -> None:
        with self._lock:
            ended = self._take_ended(now_s)
        self._call_on_outputs(ended)

    def _take_ended(self, now_s: float) -> list[TokenOutput]:
        """Ends of held requests: cancelled, waited too long, or unable to start any more.

        With the lock held; to be delivered without it.
        """
        held, why = self._held, self._why_not_ready
        ends = [TokenOutput(one, None, FinishReason.CANCELLED) for one in held.take_cancelled()]
        for req_id in held.take_expired(now_s):
            limit = f"queue_timeout_ms={self._config.queue_timeout_ms:g}"
            message = f"the request waited {limit} for the engine: {why}"
            ends.append(_failed(req_id, QueueTimeoutError(message)))
        if self._drain_s is not None or self._state is EngineState.FAILED:
            left = held.take(lambda one: True)
            ends += [_failed(request.req_id, UnavailableError(why)) for request, _ in left]
        return ends

    def _advance_close(self, now_s: float, drain_s: float) -> None:
        self._respawn_s = None
        self._load_watch.end()
        child = self._child
        if child is None:
            return
        if self._close_deadline_s is None:
            child.channel.send(pack(Kind.CLOSE, drain_s))
            self._close_deadline_s = now_s + drain_s + CLOSE_GRACE_S
        elif now_s >= self._close_deadline_s:
            child.end()
            self._on_death(CLOSED_MESSAGE)

    def _finalise(self, reason: str) -> None:
        """Leave nothing behind: no process, no unfinished request, no waiting caller."""
        if self._child:
            self._child.end()
        with self._lock:
            self._child = None
            if self._drain_s is not None:
                self._state, self._why_not_ready = EngineState.CLOSED, CLOSED_MESSAGE
            elif self._state is not EngineState.FAILED:
                self._state, self._why_not_ready = EngineState.FAILED, reason
        self._end_live(self._why_not_ready)
        self._end_held(time.monotonic())
        if not self._loaded.done():
            self._loaded.set_exception(UnavailableError(self._why_not_ready))
        self._waker.close()
        self._wake_end.close()

    # ---- small parts ----

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: awake anyway; closed: nothing left to do
            self._waker.send(b"\0")

    def _call_on_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self._call_on_output(output)

    def _call_on_output(self, output: TokenOutput) -> None:
        try:
            self._on_output(output)
        except Exception:  # one receiver's error must not end the supervision of all
            self._log(traceback.format_exc())

    def _log(self, line: str) -> None:
        with contextlib.suppress(Exception):
            self._on_log(line)


def _pack_request(request: Request) -> bytes:
    try:
        return pack(Kind.SUBMIT, request.to_wire())
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"request cannot be sent to the engine: {error}") from error


def _is_of_death(output: TokenOutput) -> bool:
    """Whether the engine ends a request because it dies itself: EngineDeadError."""
    is_unavailable = output.error_code == EngineDeadError.code
    return is_unavailable and output.reject_reason == EngineDeadError.reject_reason


def _failed(req_id: int, error: FlowPrefillError) -> TokenOutput:
    return TokenOutput(
        req_id,
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_message=str(error),
        reject_reason=error.reject_reason,
    )
