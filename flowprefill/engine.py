"""Engine: one thread that decides only on events and runs the decided task slice by slice.

A request's way: Engine.submit -> Scheduler.decide -> Executor.run(task) -> Sampler.sample ->
on_output. The main loop is `_loop`. There is one thread, and one stop signal, which cannot go
stale: a flag that is raised while the inbox holds messages, and is looked at at each boundary. A
second thread only ends the waiting of those who wait too long (waiting_room.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from flowprefill.admission import Admission
from flowprefill.clock import Clock, MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.engine_model import EngineModel, load_for_engine
from flowprefill.errors import (
    EngineDeadError,
    FlowPrefillError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
)
from flowprefill.executor.executor import Executor
from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.granularity import Granularity
from flowprefill.inbox import Inbox
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_pool import BlockPool
from flowprefill.kv.prefix import prefix_keys
from flowprefill.passes import Passes
from flowprefill.programs.weights import OnProgress
from flowprefill.recorder import PartedTimeline, Recorder
from flowprefill.request import Request, TokenOutput
from flowprefill.request_book import LiveRequest, RequestBook
from flowprefill.scheduler.events import Arrival, Cancel, Decision, Drain, Event, Timer
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions
from flowprefill.stats import EngineCounters, EngineInfo, EngineStats
from flowprefill.task_runner import TaskRunner
from flowprefill.timeline import DeviceRun

LoadModel = Callable[[EngineConfig, Clock, OnProgress], EngineModel]
"""Called while an engine starts; raises ConfigError or ModelLoadError."""


@dataclass(frozen=True)
class _Submitted:
    request: Request
    prefix_keys: tuple[bytes, ...]


@dataclass(frozen=True)
class _CancelRequest:
    req_id: int


@dataclass(frozen=True)
class _TimedOut:
    """The request waited too long and has been answered."""

    req_id: int


@dataclass(frozen=True)
class _Close:
    """End at the latest at this time; what still runs then is failed."""

    deadline_s: float


@dataclass(frozen=True)
class _Record:
    """Let it note what runs from here on; None: nothing any more."""

    recorder: Recorder | None


@dataclass(frozen=True)
class _Died:
    """What the model runs on is gone."""

    error: FlowPrefillError


_Message = _Submitted | _CancelRequest | _TimedOut | _Close | _Record | _Died


class Engine:
    """One model, its requests and its thread. An ordinary in-process object.

    on_output is called on the engine's threads, one at a time for each request, and must return at
    once. Exactly one TokenOutput of a request has a finish_reason, and it is the last one.

    Whatever happens counts at the next boundary: with granularity `whole` a cancel during a prefill
    takes effect when that prefill ends. The queue timeout is on time whatever runs. At rest
    num_started = num_finished + num_cancelled + num_rejected + num_failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_output: Callable[[TokenOutput], None],
        on_progress: OnProgress | None = None,
        load: LoadModel = load_for_engine,
    ) -> None:
        """Load and profile the model, then start. Raises ConfigError or ModelLoadError.

        on_progress(stage, fraction): while loading, on the calling thread.
        load: gives the model; another one than load_for_engine may share it between engines
        """
        report = on_progress or (lambda stage, fraction: None)
        self._clock = MonotonicClock()
        loaded = load(config, self._clock, report)
        self._config = config = loaded.config
        self._model = model = loaded.model
        self._ranks = loaded.ranks
        self._predictor = loaded.predictor
        # Sums that predictions share are built here, not in the first long request.
        self._predictor.prefill_s(model.spec.max_position_embeddings)
        self._pool = BlockPool(model.cache.num_blocks, config.block_size)
        self._scheduler = Scheduler(
            POLICIES[config.policy],
            self._predictor,
            self._pool,
            scheduler_options(config, self._predictor.saturation_tokens),
        )
        self.info = EngineInfo(
            architecture=model.spec.architecture,
            device=str(model.device.torch_device),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.spec.max_position_embeddings,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=list(model.spec.eos_token_ids),
            num_kv_blocks=model.cache.num_blocks,
            block_size=config.block_size,
            kernels=model.kernels,
            bit_invariant=loaded.is_bit_invariant,
        )
        self._interrupt = Interrupt(self._clock)
        self._inbox: Inbox[_Message] = Inbox(self._clock, self._interrupt)
        self._lock = threading.Lock()  # submit against close and failure: nothing slips in behind
        self._counters = EngineCounters()
        self._book = self._new_book(on_output)
        self._runner = self._new_runner()
        self._decision = Decision(None)
        self._newcomers: set[int] = set()  # requests whose arrival the last decision answered
        self._timeline = PartedTimeline(self._clock, self.record)
        self._close_s: float | None = None
        self._is_closed = False
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if self._ranks:
            self._ranks.call_on_death(lambda error: self._inbox.put(_Died(error)))

    def _new_book(self, on_output: Callable[[TokenOutput], None]) -> RequestBook:
        config = self._config
        admission = Admission(
            config.max_waiting_requests, config.max_waiting_tokens, config.queue_timeout_ms / 1000
        )
        return RequestBook(
            admission,
            config.queue_timeout_ms,
            self._clock,
            self._counters,
            on_output,
            on_timeout=lambda req_id: self._inbox.put(_TimedOut(req_id)),
            num_preemptions=self._scheduler.num_preemptions,
        )

    def _new_runner(self) -> TaskRunner:
        model, config = self._model, self._config
        passes = Passes(
            model.program,
            Granularity.parse(config.granularity),
            config.block_size,
            model.device.torch_device,
            self._scheduler,
        )
        return TaskRunner(
            passes,
            Executor(model.device, self._clock, self._predictor.profiled_s),
            Sampler(model.spec.vocab_size),
            self._predictor,
            self._book,
            self._counters,
            self._clock,
            prefix_caching=config.enable_prefix_caching,
            interrupt=self._interrupt,
        )

    # ---- calls from any thread ----------------------------------------------------------------

    @property
    def num_slices(self) -> int:
        """Slices since the start: a sign of life, also within a call that runs many."""
        return self._runner.executor.num_slices + self._interrupt.num_more_slices

    @property
    def slice_s(self) -> float:
        """Seconds that the slice which runs is predicted to take at most; 0 = none runs."""
        return self._predictor.speed_factor * self._runner.executor.longest_slice_s

    def submit(self, request: Request) -> None:
        """Hand over a request; waits for nothing that runs.

        Raises InvalidRequestError if it can never be served or its req_id is in use, QueueFullError
        if too much waits, UnavailableError if the engine is closed, EngineDeadError if its thread
        has failed. What is refused here counts nowhere and has no output.
        """
        self._check(request)
        keys: tuple[bytes, ...] = ()
        if self._config.enable_prefix_caching:
            keys = prefix_keys(request.prompt_token_ids, self._config.block_size)
        prefill_s = self._predictor.prefill_s(len(request.prompt_token_ids))
        with self._lock:
            if self._death:
                raise EngineDeadError(self._death)
            if self._is_closed:
                raise UnavailableError("the engine is closing")
            self._book.admit(request, prefill_s)
            self._inbox.put(_Submitted(request, keys))

    def cancel(self, req_id: int) -> None:
        """End a request as CANCELLED at the next boundary; unknown and ended ids are ignored."""
        self._inbox.put(_CancelRequest(req_id))

    def stats(self) -> EngineStats:
        """Gauges and counters; may be called at any time, also during a long slice."""
        scheduler = self._scheduler
        return self._counters.stats(
            num_waiting=scheduler.num_waiting,
            num_prefilling=scheduler.num_prefilling,
            num_decoding=scheduler.num_decoding,
            num_kv_blocks_used=self._pool.num_used,
            num_kv_blocks_cached=self._pool.num_cached,
            num_kv_blocks=self._pool.num_blocks,
            pass_bytes=self._runner.passes.live_bytes,
            num_decisions=scheduler.num_decisions,
            num_preemptions=scheduler.num_preemptions(),
            num_evictions=scheduler.num_evictions,
            num_slices=self.num_slices,
        )

    def record(self, recorder: Recorder | None) -> None:
        """Let it note what the device does from the next boundary on; None: nothing any more."""
        self._inbox.put(_Record(recorder))

    def take_timeline(self, goes_on: bool) -> tuple[list[DeviceRun], bool]:
        """See PartedTimeline.take; may be called as stats() may, by one thread."""
        return self._timeline.take(goes_on)

    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let the rest end within drain_s, fail what is left, stop the thread.

        What is left fails with UNAVAILABLE at the next boundary. drain_s may be inf. A later call
        sets a new limit.
        """
        with self._lock:
            self._is_closed = True
            self._inbox.put(_Close(self._clock.now_s() + drain_s))
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._book.close()

    def _check(self, request: Request) -> None:
        limit, vocab_size = self.info.max_model_len, self.info.vocab_size
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if not num_prompt:
            raise InvalidRequestError("the prompt has no tokens; it must have at least 1")
        asked = f"prompt of {num_prompt} tokens + max_tokens={max_tokens}"
        if num_prompt + max_tokens > limit:
            raise PromptTooLongError(f"{asked} > max_model_len={limit}")
        capacity = self.info.num_kv_blocks * self.info.block_size
        if num_prompt + max_tokens > capacity:
            raise PromptTooLongError(f"{asked} > {capacity} tokens of the KV cache")
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidParameterError("prompt_token_ids", token_id, f"in [0, {vocab_size})")
        request.sampling.check_vocab(vocab_size)

    # ---- the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._model.device.use_in_this_thread()
            self._loop()
            self._close_ranks()
        except Exception as error:
            # before anybody hears of it, as an engine process takes requests until it ends
            self._close_ranks()
            death = f"the engine failed: {type(error).__name__}: {error}"
            with self._lock:
                self._death = death
            self._book.fail_all(EngineDeadError(death))
            raise  # threading.excepthook prints it, and ends an engine process

    def _close_ranks(self) -> None:
        if self._ranks:
            self._ranks.close()

    def _loop(self) -> None:
        """Take in events, decide, run the task until it ends or something happens."""
        happened: list[Event] = []  # what the last task's end or stop means to the scheduler
        while True:
            if self._decision.task is None and not happened:
                messages = self._inbox.wait(self._wake_s())
                self._counters.wakeups += 1
            else:
                messages = self._inbox.take()
            external = [e for put_s, message in messages for e in self._take_in(put_s, message)]
            if self._is_due(self._decision.timer_s):
                external.append(Timer())
            if external or happened:
                self._decide([*happened, *external])
            if self._must_end():  # behind the decision, which can reject the last request
                return
            wake_s = self._wake_s()
            self._interrupt.timer_s = math.inf if wake_s is None else wake_s
            happened = self._runner.run(self._decision, self._newcomers)

    def _wake_s(self) -> float | None:
        times = (self._decision.timer_s, self._close_s)
        return min((t for t in times if t is not None), default=None)

    def _is_due(self, time_s: float | None) -> bool:
        return time_s is not None and self._clock.now_s() >= time_s

    def _must_end(self) -> bool:
        """After close(): when nothing is live, or the time to drain is over."""
        if self._close_s is None:
            return False
        if self._book.live and self._is_due(self._close_s):
            left = list(self._book.live)
            for req_id in left:
                self._book.fail(req_id, UnavailableError("the engine is closing"))
            self._decide([Cancel(req_id) for req_id in left])
        return not self._book.live

    def _take_in(self, put_s: float, message: _Message) -> list[Event]:
        """Events that a message means to the scheduler."""
        match message:
            case _Submitted():
                return self._arrive(put_s, message)
            case _Close(deadline_s):
                self._close_s = deadline_s
                return [Drain()]
            case _TimedOut(req_id):
                self._book.forget(req_id)
                return [Cancel(req_id)]
            case _Record(recorder):
                self._runner.recorder = recorder
                return []
            case _Died(error):
                raise error
            case _CancelRequest(req_id):
                if req_id not in self._book.live:
                    return []
                self._book.cancel(req_id)
                return [Cancel(req_id)]

    def _arrive(self, put_s: float, message: _Submitted) -> list[Event]:
        request, keys = message.request, message.prefix_keys
        # A seed of its own for each request that brings none; fixed by the engine's seed.
        seed = self._config.seed * 1_000_003 + request.req_id
        state = SamplingState(
            request.sampling, request.prompt_token_ids, self.info.eos_token_ids, seed
        )
        if not self._book.take_in(LiveRequest(request, state, put_s, keys)):
            return []
        arrival = Arrival(
            req_id=request.req_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            ttft_slo_s=request.slo.ttft_s,
            tbt_slo_s=request.slo.tbt_s,
            rank=request.slo.rank,
            weight=request.slo.weight,
            tenant=request.tenant,
            prefix_keys=keys,
        )
        return [arrival]

    def _decide(self, events: list[Event]) -> None:
        now_s = self._clock.now_s()
        decision = self._decision = self._scheduler.decide(now_s, events)
        self._counters.decision_s += self._clock.now_s() - now_s
        self._newcomers = {e.req_id for e in events if isinstance(e, Arrival)}
        for req_id in decision.rejected:
            self._book.reject(req_id, self._lateness(req_id))
        passes = self._runner.passes
        gone = [e.req_id for e in events if isinstance(e, Cancel)]
        passes.drop_step_of([*gone, *decision.evicted])
        for task_id in [t for t in passes.prefills if not self._scheduler.is_live(t)]:
            del passes.prefills[task_id]

    def _lateness(self, req_id: int) -> str:
        """Why a request is rejected, with the numbers."""
        request = self._book.live[req_id].request
        needed_s = self._predictor.prefill_s(len(request.prompt_token_ids))
        return (
            f"the first token cannot come within ttft_slo_ms={request.slo.ttft_s * 1000:g} any "
            f"more: the prefill alone takes about {needed_s:.3f} s (on_infeasible=reject)"
        )


def scheduler_options(config: EngineConfig, saturation_tokens: int) -> SchedulerOptions:
    """What model.json says of scheduling, as the Scheduler takes it."""
    granularity = Granularity.parse(config.granularity)
    return SchedulerOptions(
        max_num_seqs=config.max_num_seqs,
        max_slice_s=config.max_slice_ms / 1000,
        max_decode_share=config.max_decode_share,
        starvation_share=config.starvation_share,
        max_pack_tokens=granularity.pack_tokens(saturation_tokens),
        reject_infeasible=config.on_infeasible == "reject",
        fair_share=config.fair_share,
        prefix_caching=config.enable_prefix_caching,
    )
