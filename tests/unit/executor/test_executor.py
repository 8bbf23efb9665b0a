"""The executor on a scripted pass, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowprefill.clock import VirtualClock
from flowprefill.executor.executor import Executor
from flowprefill.interrupt import Interrupt
from flowprefill.programs.program import RunSlice, SliceCost
from flowprefill.programs.slices import Group, Slice, SliceLimits
from tests.unit.executor.streams import AsyncDevice, FakeStream, recorded_slices

PREDICTED_S = 0.5


class ScriptedPass:
    """A pass of len(boundaries) slices of one second each. Implements ProgramState."""

    def __init__(self, clock: VirtualClock, boundaries: Sequence[bool]) -> None:
        self._clock = clock
        self._boundaries = [*boundaries[:-1], False]  # a pass that is done is not left
        self.position = 0

    @property
    def is_done(self) -> bool:
        return self.position == len(self._boundaries)

    @property
    def next_slice(self) -> Slice:
        return Slice(Group.MLP, self.position, self.position + 1)

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        self._clock.advance_to(self._clock.now_s() + 1)
        self.position += 1
        return self._boundaries[self.position - 1]

    def remaining_s(self, cost: SliceCost) -> float:
        left = range(self.position, len(self._boundaries))
        return sum(cost(Slice(Group.MLP, i, i + 1)) for i in left)

    @property
    def logits(self) -> Tensor:
        raise AssertionError("the executor has no use for them")

    @property
    def live_bytes(self) -> int:
        raise AssertionError("the executor has no use for it")


class RecordingDevice:
    """Runs slices at once; counts what it was asked."""

    torch_device = torch.device("cpu")
    default_dtype = torch.float32

    def __init__(self) -> None:
        self.predictions: list[float] = []
        self.num_waits = 0

    def in_flight(self) -> None:
        return None

    def slice_limits(self, spec: object, dtype: torch.dtype, max_slice_s: float) -> SliceLimits:
        raise AssertionError("the executor has no use for it")

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        self.predictions.append(profiled_s)
        return run_slice(interrupt)

    def wait(self) -> None:
        self.num_waits += 1


class Setup:
    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.device = RecordingDevice()
        self.executor = Executor(self.device, self.clock, lambda piece: PREDICTED_S + piece.start)

    def new_pass(self, boundaries: Sequence[bool]) -> ScriptedPass:
        return ScriptedPass(self.clock, boundaries)


@pytest.fixture
def setup() -> Setup:
    return Setup()


class Wish(Interrupt):
    """Must the pass be left? Answers in turn, then the last one for ever."""

    def __init__(self, *answers: bool) -> None:
        super().__init__(VirtualClock())
        self._answers = list(answers)

    def must_leave(self) -> bool:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def never() -> Interrupt:
    return Wish(False)


def always() -> Interrupt:
    return Wish(True)


def test_an_undisturbed_pass_runs_to_its_end(setup: Setup) -> None:
    state = setup.new_pass([True] * 7)
    report = setup.executor.run(state, never())
    assert report.is_done and state.is_done
    assert setup.executor.num_slices == 7


def test_a_pass_is_left_only_at_a_boundary(setup: Setup) -> None:
    state = setup.new_pass([False, False, True, False, True, True])
    report = setup.executor.run(state, always())
    assert not report.is_done and state.position == 3
    assert not setup.executor.run(state, always()).is_done and state.position == 5
    assert setup.executor.run(state, always()).is_done


def test_a_pass_without_boundaries_ignores_the_wish_to_leave(setup: Setup) -> None:
    assert setup.executor.run(setup.new_pass([False] * 5), always()).is_done


def test_the_wish_is_asked_once_at_each_boundary_and_nowhere_else(setup: Setup) -> None:
    asked_at: list[int] = []
    state = setup.new_pass([False, True, False, True, True])

    class Asked(Interrupt):
        def must_leave(self) -> bool:
            asked_at.append(state.position)
            return False

    setup.executor.run(state, Asked(setup.clock))
    assert asked_at == [2, 4]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.lists(st.booleans(), max_size=40))
def test_any_interruptions_run_each_slice_once(boundaries: list[bool], wishes: list[bool]) -> None:
    setup = Setup()
    state, wish = setup.new_pass(boundaries), Wish(*wishes, False)
    reports = []
    while not state.is_done:
        reports.append(setup.executor.run(state, wish))
    assert setup.executor.num_slices == len(boundaries)
    assert [r.is_done for r in reports] == [False] * (len(reports) - 1) + [True]
    assert sum(r.busy_s for r in reports) == len(boundaries)
    expected = [PREDICTED_S + i for i in range(len(boundaries))]
    assert setup.device.predictions == expected
    assert sum(r.profiled_s for r in reports) == pytest.approx(sum(expected))


def test_report_covers_its_own_stretch(setup: Setup) -> None:
    state = setup.new_pass([True] * 4)
    first = setup.executor.run(state, Wish(False, True, False))
    assert (first.is_done, first.started_s, first.busy_s) == (False, 100.0, 2.0)
    assert first.profiled_s == PREDICTED_S + (PREDICTED_S + 1)
    setup.clock.advance_to(150.0)  # another task had the device
    second = setup.executor.run(state, never())
    assert (second.is_done, second.started_s, second.busy_s) == (True, 150.0, 2.0)
    assert second.profiled_s == (PREDICTED_S + 2) + (PREDICTED_S + 3)


def test_slices_count_over_all_passes(setup: Setup) -> None:
    for count in (3, 4):
        setup.executor.run(setup.new_pass([True] * count), never())
    assert setup.executor.num_slices == 7


def test_the_device_is_waited_for_at_the_end_and_not_at_a_boundary(setup: Setup) -> None:
    state = setup.new_pass([True] * 3)
    setup.executor.run(state, always())
    assert setup.device.num_waits == 0
    setup.executor.run(state, never())
    assert setup.device.num_waits == 1


def test_a_slice_that_fails_is_told_to_the_caller(setup: Setup) -> None:
    class Failing(ScriptedPass):
        def run_slice(self, interrupt: Interrupt | None = None) -> bool:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        setup.executor.run(Failing(setup.clock, [True]), never())


def test_a_pass_is_left_when_its_time_is_over(setup: Setup) -> None:
    state, interrupt = setup.new_pass([True] * 5), Interrupt(setup.clock)
    assert not setup.executor.run(state, interrupt, until_s=102.0).is_done
    assert state.position == 2
    interrupt.timer_s = 103.0
    assert not setup.executor.run(state, interrupt).is_done
    assert state.position == 3


def test_slices_of_one_call_are_all_predicted_and_count_once(setup: Setup) -> None:
    class Eager(ScriptedPass):
        """Runs two slices a call."""

        def run_slice(self, interrupt: Interrupt | None = None) -> bool:
            super().run_slice()
            return super().run_slice()

    report = setup.executor.run(Eager(setup.clock, [True] * 4), never())
    assert setup.executor.num_slices == 2
    assert report.profiled_s == 4 * PREDICTED_S + 0 + 1 + 2 + 3


def test_the_longest_slice_can_be_read_until_a_pass_is_done(setup: Setup) -> None:
    longest: list[float] = []

    class Read(ScriptedPass):
        def run_slice(self, interrupt: Interrupt | None = None) -> bool:
            longest.append(setup.executor.longest_slice_s)
            return super().run_slice(interrupt)

    patient, urgent = Read(setup.clock, [True] * 3), Read(setup.clock, [True] * 2)
    assert not setup.executor.run(patient, Wish(False, True)).is_done
    assert not setup.executor.run(urgent, always()).is_done
    assert setup.executor.run(urgent, never()).is_done
    assert setup.executor.longest_slice_s == 0.0
    assert setup.executor.run(patient, never()).is_done
    # the patient's second one may still run when the urgent ones are launched
    assert longest == [0.5, 1.5, 1.5, 1.5, 2.5]


RECORDED = recorded_slices()
MAX_SLICE_S = 0.004


class LaunchedPass(ScriptedPass):
    """A pass whose slices take no time of the host; it may be left behind each."""

    def __init__(self, num_slices: int) -> None:
        super().__init__(VirtualClock(), [True] * num_slices)

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        self.position += 1
        return not self.is_done

    def remaining_s(self, cost: SliceCost) -> float:
        return 0.0


class AsyncSetup:
    """Recorded slices on a device that is launched ahead, whichever pass they are of."""

    def __init__(self, slices: Sequence[tuple[float, float]], launch_s: float) -> None:
        self.stream = FakeStream(VirtualClock(100.0))
        self.actual = [actual_s for _, actual_s in slices]
        device = AsyncDevice(self.stream, MAX_SLICE_S, self.actual, launch_s)
        predictions = iter([predicted_s for predicted_s, _ in slices])
        self.executor = Executor(device, self.stream.clock, lambda piece: next(predictions))


def after(num_slices: int) -> Interrupt:
    """Wishes to leave at the boundary behind so many slices."""
    return Wish(*[False] * (num_slices - 1), True)


@pytest.mark.parametrize("launch_s", [0.0, 0.0002, 0.01])
@pytest.mark.parametrize("num_before", [1, 2, 7])
@pytest.mark.parametrize("num_newcomer", [1, 2, 9])
def test_a_newcomer_begins_when_the_device_begins_it_and_not_when_it_is_launched(
    num_before: int, num_newcomer: int, launch_s: float
) -> None:
    setup = AsyncSetup(RECORDED[: num_before + num_newcomer], launch_s)
    assert not setup.executor.run(LaunchedPass(num_before + 1), after(num_before)).is_done
    backlog_s, stopped_s = setup.stream.backlog_s, setup.stream.clock.now_s()
    assert backlog_s > 0
    report = setup.executor.run(LaunchedPass(num_newcomer), never())
    started_s = setup.stream.starts_s[num_before]
    assert report.is_done and setup.stream.free_s is not None
    assert report.started_s == pytest.approx(started_s)
    assert report.busy_s == pytest.approx(setup.stream.free_s - started_s)
    # blocking: what was in flight when it was asked for, and its own launch
    assert started_s - stopped_s <= backlog_s + launch_s + 1e-9


def test_between_two_passes_the_device_does_not_idle() -> None:
    setup = AsyncSetup([(0.001, 0.001)] * 8, launch_s=0.0002)
    setup.executor.run(LaunchedPass(5), after(4))
    setup.executor.run(LaunchedPass(3), never())
    assert setup.stream.idle_s == 0


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.0001, 0.0005]),
    st.integers(0, len(RECORDED) - 200),
)
def test_what_ran_before_is_in_no_pass_s_device_time(
    stretches: list[int], launch_s: float, offset: int
) -> None:
    """Queueing must not enter a sample of the device's speed."""
    setup = AsyncSetup(RECORDED[offset : offset + 200], launch_s)
    patient, num_launched = LaunchedPass(1000), 0
    for num_slices in stretches:
        setup.executor.run(patient, after(num_slices))
        num_launched += num_slices
        report = setup.executor.run(LaunchedPass(num_slices), never())
        run_s = sum(setup.actual[num_launched : num_launched + num_slices])
        num_launched += num_slices
        assert run_s <= report.busy_s + 1e-9
        assert report.busy_s <= run_s + num_slices * launch_s + 1e-9
