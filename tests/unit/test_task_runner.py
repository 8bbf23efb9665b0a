"""What runs between two decisions: a tiny model in virtual time, each slice takes a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flowprefill.admission import Admission
from flowprefill.clock import VirtualClock
from flowprefill.executor.device import CpuDevice
from flowprefill.executor.executor import Executor
from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.interrupt import Interrupt
from flowprefill.kv.prefix import prefix_keys
from flowprefill.loading import LoadedModel
from flowprefill.passes import Passes
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.program import RunSlice
from flowprefill.request import FinishReason, PrefillTiming, Request, TokenOutput
from flowprefill.request_book import LiveRequest, RequestBook
from flowprefill.scheduler.events import (
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    Finished,
    PacedSteps,
    PrefillDone,
    PrefillParked,
    PrefillTask,
)
from flowprefill.stats import EngineCounters
from flowprefill.task_runner import TaskRunner
from tests.factories import TINY_VOCAB_SIZE, make_request, write_tiny_model
from tests.unit.programs.runs import CPU, TILE, load_quietly

BLOCK = 16
PREFILL_S, STEP_S = 5, 3
"""Slices, hence seconds, of a pass of the model of two layers."""
QUEUE_TIMEOUT_S = 1000.0
EOS_ID = TINY_VOCAB_SIZE - 1


class TickingDevice(CpuDevice):
    """Runs a slice in a second of a virtual clock, and what a scenario does before it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(num_threads=1)
        self._clock = clock
        self.at_s: dict[float, Callable[[], object]] = {}

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        action = self.at_s.pop(self._clock.now_s(), None)
        if action:
            action()
        self._clock.advance_to(self._clock.now_s() + 1)
        return run_slice(None)  # one by one


class Bench:
    """A runner with 16 blocks for each request; time starts at 0."""

    def __init__(self, model: LoadedModel) -> None:
        self.clock = VirtualClock()
        self.counters = EngineCounters()
        self.outputs: list[TokenOutput] = []
        self.interrupt = Interrupt(self.clock)
        self.device = TickingDevice(self.clock)
        self.timed_out: list[int] = []
        self.book = RequestBook(
            Admission(100, None, QUEUE_TIMEOUT_S),
            QUEUE_TIMEOUT_S * 1000,
            self.clock,
            self.counters,
            self.outputs.append,
            self.timed_out.append,
            num_preemptions=lambda req_id: 0,
        )
        coefficients = {
            kind: (1.0, 0.0, 0.0)
            for kind in ("qkv", "attention", "mlp", "layers", "head", "logits")
        }
        predictor = FittedPredictor(coefficients, model.spec.num_layers, model.program.limits)
        self.passes = Passes(model.program, TILE, BLOCK, CPU, self)
        self.runner = TaskRunner(
            self.passes,
            Executor(self.device, self.clock, predictor.profiled_s),
            Sampler(model.spec.vocab_size),
            predictor,
            self.book,
            self.counters,
            self.clock,
            prefix_caching=True,
            interrupt=self.interrupt,
        )

    # what Passes asks of the scheduler

    def block_ids(self, req_id: int) -> list[int]:
        return list(range(16 * req_id, 16 * req_id + 16))

    def num_cached_tokens(self, req_id: int) -> int:
        return 0

    # what a scenario does

    def arrive(self, req_id: int, prompt_len: int = 20, **sampling: Any) -> Request:
        sampling = {"max_tokens": 100, "ignore_eos": True, **sampling}
        put_s = self.clock.now_s()
        request = make_request(prompt_len, req_id=req_id, arrival_s=put_s, **sampling)
        self.book.admit(request, 0.0)
        state = SamplingState(request.sampling, request.prompt_token_ids, (EOS_ID,), seed=0)
        keys = prefix_keys(request.prompt_token_ids, BLOCK)
        assert self.book.take_in(LiveRequest(request, state, put_s, keys))
        return request

    def stream(self, req_id: int, **sampling: Any) -> None:
        """A request that has its first token."""
        self.arrive(req_id, **sampling)
        events = self.prefill(req_id)
        assert events == [PrefillDone(req_id)]

    def prefill(self, *req_ids: int, steps: PacedSteps | None = None) -> list[Event]:
        """Run a prefill task that has the first request's id."""
        return self.runner.run(Decision(PrefillTask(req_ids[0], req_ids), steps=steps), set())

    def leave_at(self, time_s: float) -> None:
        """What happens in the slice that starts at time_s is found at the boundary behind it."""
        self.at(time_s, self.interrupt.raise_now)

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        self.device.at_s[time_s] = action

    def token_times(self, req_id: int) -> list[float]:
        return [output.token_s for output in self.outputs if output.req_id == req_id]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)
    model = load_quietly(path, kv_cache_memory_bytes=64 * BLOCK * 2 * 2 * 32 * 4)
    model.program.limits = replace(model.program.limits, decode_bytes=0)  # a layer is a slice
    return model


@pytest.fixture
def bench(model: LoadedModel) -> Iterator[Bench]:
    bench = Bench(model)
    yield bench
    bench.book.close()


def paced(
    *req_ids: int, release_s: float, interval_s: float = 1.0, max_steps: int = 100
) -> PacedSteps:
    return PacedSteps(DecodeStep(req_ids), release_s, interval_s, max_steps)


# ---- prefills -----------------------------------------------------------------------------------


def test_prefill_runs_to_its_token(bench: Bench) -> None:
    bench.arrive(1)
    assert bench.prefill(1) == [PrefillDone(1)]
    assert bench.token_times(1) == [PREFILL_S]
    assert bench.passes.is_empty
    assert bench.counters.prefill_tokens == 20


def test_prefill_that_ends_its_request_says_what_its_blocks_hold(bench: Bench) -> None:
    """Its 48 tokens fill three blocks, but the last one's K and V were never written."""
    request = bench.arrive(1, prompt_len=47, max_tokens=1)
    keys = prefix_keys(request.prompt_token_ids, BLOCK)
    assert bench.prefill(1) == [PrefillDone(1), Finished(1, keys)]
    assert len(keys) == 2


def test_prefill_is_left_at_the_next_boundary_and_goes_on(bench: Bench) -> None:
    bench.arrive(1)
    bench.leave_at(2)
    assert bench.prefill(1) == [PrefillParked(1, remaining_s=2.0)]
    assert bench.clock.now_s() == 3
    bench.interrupt.clear()
    assert bench.prefill(1) == [PrefillDone(1)]
    assert bench.token_times(1) == [PREFILL_S]


def test_first_token_says_what_its_prefill_took_without_what_ran_between(bench: Bench) -> None:
    bench.stream(1)
    bench.arrive(2)  # at 5 s
    bench.clock.advance_to(7)
    bench.leave_at(8)
    bench.prefill(2)  # two slices, from 7 s
    bench.interrupt.clear()
    bench.arrive(3)
    bench.runner.run(Decision(PrefillTask(3, (3,))), newcomers={3})  # takes the device at once
    bench.prefill(2, steps=paced(1, release_s=15, interval_s=99))  # one decode step in between
    bench.runner.run(Decision(DecodeStep((2,)), max_steps=1), set())
    timings = [(o.req_id, o.prefill) for o in bench.outputs if o.req_id != 1]
    whole = {"predicted_s": PREFILL_S, "device_s": PREFILL_S, "num_cached_tokens": 0}
    assert timings == [
        (3, PrefillTiming(started_s=9, blocking_s=0, **whole)),
        (2, PrefillTiming(started_s=7, **whole)),
        (2, None),
    ]
    assert bench.token_times(2)[0] == 7 + 2 * PREFILL_S + STEP_S


def test_pack_with_a_member_that_was_timed_out_is_not_started(bench: Bench) -> None:
    bench.arrive(1)
    bench.clock.advance_to(QUEUE_TIMEOUT_S / 2)
    bench.arrive(2)
    bench.clock.advance_to(QUEUE_TIMEOUT_S)
    assert bench.prefill(2, 1) == []
    assert bench.timed_out == [1]
    assert bench.passes.is_empty
    bench.book.forget(1)
    assert bench.prefill(2) == [PrefillDone(2)]


def test_members_of_a_pack_end_each_for_itself(bench: Bench) -> None:
    bench.arrive(1)
    bench.arrive(2, max_tokens=1)
    bench.arrive(3, ignore_eos=False, logit_bias={EOS_ID: 100.0})
    done, *ends = bench.prefill(1, 2, 3)
    assert done == PrefillDone(1)
    assert [e.req_id for e in ends if isinstance(e, Finished)] == [2, 3]
    assert [o.finish_reason for o in bench.outputs] == [
        None,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]


def test_only_a_newcomer_that_takes_the_device_from_another_was_blocked(bench: Bench) -> None:
    bench.arrive(1)
    bench.leave_at(2)
    bench.prefill(1)
    bench.interrupt.clear()
    bench.arrive(2)
    bench.clock.advance_to(10.0)
    bench.runner.run(Decision(PrefillTask(2, (2,))), newcomers={2})
    bench.runner.run(Decision(PrefillTask(1, (1,))), newcomers={1})
    bench.arrive(3)
    bench.runner.run(Decision(PrefillTask(3, (3,))), newcomers={3})
    blocked_s = {o.req_id: o.prefill.blocking_s for o in bench.outputs if o.prefill}
    assert blocked_s == {1: None, 2: 7.0, 3: None}


# ---- decode steps -------------------------------------------------------------------------------


def test_steps_run_until_the_last_one_allowed_and_are_told_once(bench: Bench) -> None:
    bench.stream(1)
    start_s = bench.clock.now_s()
    events = bench.runner.run(Decision(DecodeStep((1,)), max_steps=3), set())
    assert events == [DecodeStepDone((1,), start_s + 3 * STEP_S, num_steps=3)]
    assert bench.token_times(1)[1:] == [start_s + n * STEP_S for n in (1, 2, 3)]


def test_steps_end_with_the_first_that_ends_a_request(bench: Bench) -> None:
    bench.stream(1)
    bench.stream(2, max_tokens=3)
    done, end = bench.runner.run(Decision(DecodeStep((1, 2)), max_steps=10), set())
    assert isinstance(done, DecodeStepDone) and done.num_steps == 2
    assert isinstance(end, Finished) and end.req_id == 2
    # 20 prompt tokens and two of three answer tokens were written
    assert len(end.prefix_keys) == 1


def test_step_left_midway_gives_nothing_until_it_has_ended(bench: Bench) -> None:
    bench.stream(1)
    bench.stream(2)
    bench.leave_at(11)
    assert bench.runner.run(Decision(DecodeStep((1, 2)), max_steps=10), set()) == []
    assert len(bench.outputs) == 2
    bench.interrupt.clear()
    # It goes on with its members, and then those that are asked for now need a decision.
    events = bench.runner.run(Decision(DecodeStep((1,)), max_steps=10), set())
    assert events == [DecodeStepDone((1, 2), 10.0 + STEP_S)]


# ---- steps beside a prefill ---------------------------------------------------------------------


def test_steps_beside_a_prefill_run_when_due_and_are_told_with_its_end(bench: Bench) -> None:
    bench.stream(1)
    bench.arrive(2)
    start_s = bench.clock.now_s()
    steps = paced(1, release_s=start_s + 2, interval_s=1.0)
    events = bench.prefill(2, steps=steps)
    # two slices, a step, one slice, a step, one slice, a step, the last slice
    first_s = start_s + 2 + STEP_S
    times = [first_s, first_s + 1 + STEP_S, first_s + 2 * (1 + STEP_S)]
    assert bench.token_times(1)[1:] == times
    assert events == [DecodeStepDone((1,), times[-1], num_steps=3), PrefillDone(2)]
    assert bench.token_times(2) == [start_s + PREFILL_S + 3 * STEP_S]


def test_step_that_is_due_at_once_runs_before_the_first_slice(bench: Bench) -> None:
    bench.stream(1)
    bench.arrive(2)
    bench.prefill(2, steps=paced(1, release_s=0.0, interval_s=100.0))
    assert bench.token_times(1) == [PREFILL_S, PREFILL_S + STEP_S]
    assert bench.token_times(2) == [2 * PREFILL_S + STEP_S]


def test_after_the_last_step_allowed_the_prefill_is_left_for_a_decision(bench: Bench) -> None:
    bench.stream(1)
    bench.arrive(2)
    start_s = bench.clock.now_s()
    events = bench.prefill(2, steps=paced(1, release_s=start_s + 1, max_steps=2))
    end_s = start_s + 2 + 2 * STEP_S
    assert events == [
        PrefillParked(2, remaining_s=3.0),
        DecodeStepDone((1,), end_s, num_steps=2),
    ]
    assert bench.clock.now_s() == end_s


def test_end_of_a_stream_beside_a_prefill_is_told_at_once(bench: Bench) -> None:
    bench.stream(1, max_tokens=2)
    bench.arrive(2)
    start_s = bench.clock.now_s()
    parked, done, end = bench.prefill(2, steps=paced(1, release_s=start_s + 1))
    assert parked == PrefillParked(2, remaining_s=4.0)
    assert done == DecodeStepDone((1,), start_s + 1 + STEP_S)
    assert isinstance(end, Finished) and end.req_id == 1


def test_what_happens_in_a_step_beside_a_prefill_leaves_both(bench: Bench) -> None:
    bench.stream(1)
    bench.arrive(2)
    bench.leave_at(PREFILL_S + 1 + 1)  # in the step's second slice
    steps = paced(1, release_s=PREFILL_S + 1.0)
    assert bench.prefill(2, steps=steps) == [PrefillParked(2, remaining_s=4.0)]
    assert bench.passes.step is not None
    bench.interrupt.clear()
    done, parked_or_done = bench.prefill(2, steps=paced(1, release_s=0.0, interval_s=100.0))
    assert done == DecodeStepDone((1,), PREFILL_S + 1 + STEP_S)
    assert parked_or_done == PrefillDone(2)


def test_request_without_a_finite_logit_fails_alone_and_is_told(
    bench: Bench, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = bench.arrive(1)
    bench.arrive(2)
    poison = next(t for t in sick.prompt_token_ids if t not in bench.book.live[2].token_ids)
    embed = model.program.operators._embed.clone()
    embed[poison] = float("nan")
    monkeypatch.setattr(model.program.operators, "_embed", embed)
    assert bench.prefill(1, 2) == [PrefillDone(1), Finished(1)]
    assert bench.outputs[0].error_code == "INTERNAL"
    assert bench.outputs[1].token_id is not None
    assert bench.counters.failed == 1
