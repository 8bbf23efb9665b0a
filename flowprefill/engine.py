"""Engine: one thread that decides only on events and runs the decided task slice by slice.

A request's way: Engine.submit -> Scheduler.decide -> Executor.run(task) -> Sampler.sample ->
on_output. The main loop is `_loop`. There is one thread, so there are no stop signals to go stale:
a preemption cannot act before a boundary anyway, and there the executor looks at the inbox.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.errors import (
    EngineDeadError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
)
from flowprefill.executor.executor import Executor, RunReport
from flowprefill.executor.sampler import Sampled, Sampler, SamplingState
from flowprefill.granularity import Granularity
from flowprefill.inbox import Inbox
from flowprefill.kv.block_pool import BlockPool
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import OnProgress, load_model, profile_model
from flowprefill.predictor.fitted import FittedPredictor, fit
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStep,
    DecodeStepDone,
    Drain,
    Event,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler
from flowprefill.stats import EngineInfo, EngineStats

MAX_BLOCKING_SAMPLES = 4096


@dataclass(frozen=True)
class _CancelRequest:
    req_id: int


@dataclass(frozen=True)
class _Close:
    """End at the latest at this time; what still runs then is failed."""

    deadline_s: float


_Message = Request | _CancelRequest | _Close


@dataclass
class _Live:
    """A request inside the engine."""

    request: Request
    sampling: SamplingState
    put_s: float
    """When it entered the inbox."""
    table: BlockTable | None = None


@dataclass
class _Counters:
    """What stats() counts since the start; written by the engine thread, `started` by submit."""

    wakeups: int = 0
    decision_s: float = 0.0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    failed: int = 0
    blocking_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_BLOCKING_SAMPLES))


class Engine:
    """One model, its requests and its thread. An ordinary in-process object.

    on_output is called on the engine thread and must return at once. Exactly one TokenOutput of a
    request has a finish_reason, and it is the last one.

    Whatever happens counts at the next boundary: with granularity `whole` a cancel or a queue
    timeout during a prefill takes effect when that prefill ends. At rest num_started = num_finished
    + num_cancelled + num_rejected + num_failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_output: Callable[[TokenOutput], None],
        on_progress: OnProgress | None = None,
    ) -> None:
        """Load and profile the model, then start. Raises ConfigError or ModelLoadError.

        on_progress(stage, fraction): while loading, on the calling thread.
        """
        report = on_progress or (lambda stage, fraction: None)
        self._config = config
        self._on_output = on_output
        self._clock = MonotonicClock()
        self._model = model = load_model(config, report)
        profile = profile_model(model, self._clock, report)
        self._predictor = FittedPredictor(
            fit(profile.samples), model.spec.num_layers, model.program.limits
        )
        self._executor = Executor(model.device, self._clock, self._predictor.slice_s)
        self._sampler = Sampler(model.spec.vocab_size)
        self._granularity = Granularity.parse(config.granularity)
        self._pool = BlockPool(model.cache.num_blocks, config.block_size)
        self._scheduler = Scheduler(
            POLICIES[config.policy],
            self._predictor,
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_slice_s=config.max_slice_ms / 1000,
            max_decode_share=config.max_decode_share,
            queue_timeout_s=config.queue_timeout_ms / 1000,
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
            bit_invariant=profile.is_bit_invariant,
        )
        self._inbox: Inbox[_Message] = Inbox(self._clock)
        self._lock = threading.Lock()  # submit against close and failure: nothing slips in behind
        self._unfinished: set[int] = set()  # handed over and not yet ended
        self._live: dict[int, _Live] = {}
        self._prefills: dict[int, ProgramState] = {}  # started and unfinished, by task id
        self._step: tuple[tuple[int, ...], ProgramState] | None = None  # a decode step left midway
        self._decision = Decision(None)
        self._arrived: set[int] = set()  # requests whose arrival the last decision answered
        self._counters = _Counters()
        self._close_s: float | None = None
        self._is_closed = False
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- calls from any thread ----------------------------------------------------------------

    @property
    def num_slices(self) -> int:
        """Slices run since the start: a sign of life."""
        return self._executor.num_slices

    def submit(self, request: Request) -> None:
        """Hand over a request; waits for nothing that runs.

        Raises InvalidRequestError if it can never be served or its req_id is in use,
        UnavailableError if the engine is closed, EngineDeadError if its thread has failed. What
        is refused here counts nowhere and has no output.
        """
        self._check(request)
        with self._lock:
            if self._death:
                raise EngineDeadError(self._death)
            if self._is_closed:
                raise UnavailableError("the engine is closing")
            if request.req_id in self._unfinished:
                raise InvalidParameterError("req_id", request.req_id, "no live request's")
            self._unfinished.add(request.req_id)
            self._counters.started += 1
            self._inbox.put(request)

    def cancel(self, req_id: int) -> None:
        """End a request as CANCELLED at the next boundary; unknown and ended ids are ignored."""
        self._inbox.put(_CancelRequest(req_id))

    def stats(self) -> EngineStats:
        """Gauges and counters; may be called at any time, also during a long slice."""
        scheduler, counters = self._scheduler, self._counters
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_prefilling=scheduler.num_prefilling,
            num_decoding=scheduler.num_decoding,
            num_kv_blocks_used=self._pool.num_used,
            num_kv_blocks=self._pool.num_blocks,
            num_decisions=scheduler.num_decisions,
            num_wakeups=counters.wakeups,
            decision_seconds_total=counters.decision_s,
            num_preemptions=scheduler.num_preemptions(),
            num_slices=self.num_slices,
            num_prefill_tokens=counters.prefill_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_started=counters.started,
            num_finished=counters.finished,
            num_cancelled=counters.cancelled,
            num_rejected=counters.rejected,
            num_failed=counters.failed,
            blocking_s=list(counters.blocking_s),
        )

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

    def _check(self, request: Request) -> None:
        # What fits max_model_len fits the KV cache alone: load_model refuses a smaller cache.
        limit, vocab_size = self.info.max_model_len, self.info.vocab_size
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if not num_prompt:
            raise InvalidRequestError("the prompt has no tokens; it must have at least 1")
        if num_prompt + max_tokens > limit:
            raise PromptTooLongError(
                f"prompt of {num_prompt} tokens + max_tokens={max_tokens} > max_model_len={limit}"
            )
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidParameterError("prompt_token_ids", token_id, f"in [0, {vocab_size})")
        request.sampling.check_vocab(vocab_size)

    # ---- the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._model.device.use_in_this_thread()
            self._loop()
        except Exception as error:
            death = f"the engine failed: {type(error).__name__}: {error}"
            with self._lock:
                self._death = death
            for req_id in sorted(self._unfinished):  # also those still in the inbox
                self._fail(req_id, EngineDeadError.code, death)
            raise  # threading.excepthook prints it, and ends an engine process

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
            if external or not self._may_repeat(happened):
                self._decide([*happened, *external])
                happened = []
            if self._must_end():  # behind the decision, which can time the last request out
                return
            happened = _merge(happened, self._run_task())

    def _wake_s(self) -> float | None:
        times = (self._decision.timer_s, self._close_s)
        return min((t for t in times if t is not None), default=None)

    def _is_due(self, time_s: float | None) -> bool:
        return time_s is not None and self._clock.now_s() >= time_s

    def _may_repeat(self, happened: list[Event]) -> bool:
        """A decode step with unchanged members needs no decision."""
        # The last event tells: an end of a request follows its step, and is decided on at once.
        unchanged = bool(happened) and isinstance(happened[-1], DecodeStepDone)
        return self._decision.repeat_decode and unchanged

    def _must_end(self) -> bool:
        """After close(): when nothing is live, or the time to drain is over."""
        if self._close_s is None:
            return False
        if self._live and self._is_due(self._close_s):
            left = list(self._live)
            for req_id in left:
                self._fail(req_id, UnavailableError.code, "the engine is closing")
            self._step = None
            self._decide([Cancel(req_id) for req_id in left])
        return not self._live

    def _take_in(self, put_s: float, message: _Message) -> list[Event]:
        """Events that a message means to the scheduler."""
        if isinstance(message, Request):
            return [self._arrive(put_s, message)]
        if isinstance(message, _Close):
            self._close_s = message.deadline_s
            return [Drain()]
        if message.req_id not in self._live:
            return []
        self._counters.cancelled += 1
        self._end(message.req_id, FinishReason.CANCELLED)
        if self._step and message.req_id in self._step[0]:
            self._step = None  # its blocks go to others; the rest of the step runs again
        return [Cancel(message.req_id)]

    def _arrive(self, put_s: float, request: Request) -> Arrival:
        # A seed of its own for each request that brings none; fixed by the engine's seed.
        seed = self._config.seed * 1_000_003 + request.req_id
        state = SamplingState(
            request.sampling, request.prompt_token_ids, self.info.eos_token_ids, seed
        )
        self._live[request.req_id] = _Live(request, state, put_s)
        return Arrival(
            req_id=request.req_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            ttft_slo_s=request.slo.ttft_s,
            tbt_slo_s=request.slo.tbt_s,
        )

    def _decide(self, events: list[Event]) -> None:
        now_s = self._clock.now_s()
        self._decision = self._scheduler.decide(now_s, events)
        self._counters.decision_s += self._clock.now_s() - now_s
        self._arrived = {e.req_id for e in events if isinstance(e, Arrival)}
        for req_id in self._decision.timed_out:
            self._counters.rejected += 1
            limit = self._config.queue_timeout_ms
            message = f"the request did not start within queue_timeout_ms={limit:g}"
            self._end(req_id, FinishReason.ERROR, UnavailableError.code, message)
        for task_id in [t for t in self._prefills if not self._scheduler.is_live(t)]:
            del self._prefills[task_id]

    # ---- tasks --------------------------------------------------------------------------------

    def _run_task(self) -> list[Event]:
        """Run the decided task until it ends or is left. Returns what the scheduler must know."""
        task = self._decision.task
        if isinstance(task, PrefillTask):
            return self._run_prefill(task)
        if isinstance(task, DecodeStep):
            return self._run_step(task)
        return []

    def _run_prefill(self, task: PrefillTask) -> list[Event]:
        interrupts = bool(self._prefills) or self._step is not None
        state = self._prefills.get(task.task_id)
        is_new = state is None
        if state is None:
            inputs = [self._prompt_input(req_id) for req_id in task.req_ids]
            state = self._model.program.prefill(inputs, self._granularity)
            self._prefills[task.task_id] = state
        report = self._run_state(state)
        if is_new and interrupts:
            self._note_blocking(task, report)
        if not report.is_done:
            return [PrefillParked(task.task_id, state.remaining_s(self._predictor.slice_s))]
        del self._prefills[task.task_id]
        live = [self._live[req_id] for req_id in task.req_ids]
        self._counters.prefill_tokens += sum(len(x.request.prompt_token_ids) for x in live)
        return [PrefillDone(task.task_id), *self._sample(task.req_ids, state)]

    def _run_step(self, task: DecodeStep) -> list[Event]:
        if self._step is None:
            inputs = [self._last_token_input(req_id) for req_id in task.req_ids]
            self._step = task.req_ids, self._model.program.decode(inputs)
        req_ids, state = self._step
        if not self._run_state(state).is_done:
            return []
        self._step = None
        return [DecodeStepDone(req_ids), *self._sample(req_ids, state)]

    def _run_state(self, state: ProgramState) -> RunReport:
        report = self._executor.run(state, self._should_leave)
        if report.is_done:  # else launched slices may still run, and busy_s would be too short
            self._predictor.observe(report.busy_s, report.predicted_s)
        return report

    def _should_leave(self) -> bool:
        return self._inbox.has_messages() or self._is_due(self._wake_s())

    def _prompt_input(self, req_id: int) -> SequenceInput:
        live = self._live[req_id]
        block_ids = self._scheduler.block_ids(req_id)
        device = self._model.device.torch_device
        live.table = BlockTable(block_ids, self._config.block_size, device)
        return SequenceInput(live.request.prompt_token_ids, 0, live.table)

    def _last_token_input(self, req_id: int) -> SequenceInput:
        live = self._live[req_id]
        outputs = live.sampling.output_token_ids
        assert live.table is not None, "a decoding request has blocks"
        start = len(live.request.prompt_token_ids) + len(outputs) - 1
        return SequenceInput(outputs[-1:], start, live.table)

    def _note_blocking(self, task: PrefillTask, report: RunReport) -> None:
        """Time from the arrival in the inbox to the first slice, of a newcomer that preempts."""
        for req_id in task.req_ids:
            if req_id in self._arrived:
                self._counters.blocking_s.append(report.started_s - self._live[req_id].put_s)

    # ---- tokens and ends ----------------------------------------------------------------------

    def _sample(self, req_ids: tuple[int, ...], state: ProgramState) -> list[Finished]:
        """Choose and emit the next token of each request. Returns those that ended with it."""
        states = [self._live[req_id].sampling for req_id in req_ids]
        sampled = self._sampler.sample(state.logits, states)
        now_s = self._clock.now_s()
        ended = [self._emit(i, s, now_s) for i, s in zip(req_ids, sampled, strict=True)]
        return [Finished(i) for i, is_end in zip(req_ids, ended, strict=True) if is_end]

    def _emit(self, req_id: int, sampled: Sampled, now_s: float) -> bool:
        """Send one token. True if the request ended with it."""
        if sampled.error:
            self._fail(req_id, "INTERNAL", sampled.error)
            return True
        state = self._live[req_id].sampling
        state.output_token_ids.append(sampled.token_id)
        reason = state.finish_reason(sampled.token_id)
        self._counters.generated_tokens += 1
        if reason:
            self._counters.finished += 1
            self._forget(req_id)
        self._on_output(
            TokenOutput(
                req_id=req_id,
                token_id=sampled.token_id,
                finish_reason=reason,
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
                num_preemptions=self._scheduler.num_preemptions(req_id),
                token_s=now_s,
            )
        )
        return reason is not None

    def _fail(self, req_id: int, code: str, message: str) -> None:
        self._counters.failed += 1
        self._end(req_id, FinishReason.ERROR, code, message)

    def _end(
        self, req_id: int, reason: FinishReason, code: str | None = None, message: str | None = None
    ) -> None:
        """The last output of a request that ends without a token."""
        self._forget(req_id)
        self._on_output(
            TokenOutput(
                req_id=req_id,
                finish_reason=reason,
                error_code=code,
                error_message=message,
                num_preemptions=self._scheduler.num_preemptions(req_id),
                token_s=self._clock.now_s(),
            )
        )

    def _forget(self, req_id: int) -> None:
        self._live.pop(req_id, None)
        self._unfinished.discard(req_id)


def _merge(before: list[Event], after: list[Event]) -> list[Event]:
    """Both, with a repeated decode step counted instead of listed."""
    match before[-1:], after[:1]:
        case [DecodeStepDone(members, count)], [DecodeStepDone(same, more)] if members == same:
            return [*before[:-1], DecodeStepDone(members, count + more), *after[1:]]
    return [*before, *after]
