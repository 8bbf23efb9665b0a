"""The launch window against a device in virtual time, with ideal and with recorded slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.executor.cuda_device import CudaDevice
from flowprefill.executor.executor import Executor
from flowprefill.executor.launch_window import LaunchWindow
from flowprefill.interrupt import Interrupt
from tests.unit.executor.streams import FakeStream, PretendedCard, recorded_slices
from tests.unit.executor.test_executor import LaunchedPass

MAX_SLICE_S = 0.004
SHORTEST_S = 2**-14  # binary fractions add up exactly
ROUNDING = 1e-9

durations = st.lists(
    st.integers(1, int(MAX_SLICE_S / SHORTEST_S)).map(lambda n: n * SHORTEST_S),
    min_size=1,
    max_size=60,
)
RECORDED = recorded_slices()
stretches = st.builds(
    lambda start, count: RECORDED[start : start + count],
    st.integers(0, len(RECORDED) - 1),
    st.integers(2, 200),
)
"""Of the recorded run."""
launch_costs = st.lists(st.sampled_from([0.0, 0.0001, 0.001, 0.01]), min_size=200, max_size=200)


def launch_all(
    window: LaunchWindow,
    stream: FakeStream,
    predicted: list[float],
    actual: list[float] | None = None,
    launch_s: float = 0.0,
) -> Iterator[float]:
    """Launch slice after slice; yields each slice's predicted seconds once it is launched."""
    for predicted_s, actual_s in zip(predicted, actual or predicted, strict=True):
        window.make_room()
        stream.clock.advance_to(stream.clock.now_s() + launch_s)
        window.launched(stream.launch(actual_s), predicted_s)
        yield predicted_s


class TestIdealSlices:
    @given(durations)
    def test_at_most_max_slice_and_one_slice_are_in_flight(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for slice_s in launch_all(window, stream, slices):
            assert window.in_flight_s <= MAX_SLICE_S + slice_s
            # what a newcomer waits for
            assert stream.backlog_s <= MAX_SLICE_S + slice_s

    @given(durations, st.sampled_from([0.25, 0.5, 2.0, 4.0]))
    def test_wrong_predictions_scale_the_backlog_and_no_more(
        self, slices: list[float], factor: float
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        actual = [factor * s for s in slices]
        for slice_s in launch_all(window, stream, slices, actual):
            assert window.in_flight_s <= MAX_SLICE_S + slice_s
            assert stream.backlog_s <= factor * (MAX_SLICE_S + slice_s)

    @given(durations)
    def test_device_never_idles_while_launches_are_instant(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices):
            assert stream.idle_s == 0
        assert stream.free_s == sum(slices)

    @given(durations)
    def test_device_never_idles_while_launches_are_faster_than_slices(
        self, slices: list[float]
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices, launch_s=SHORTEST_S):
            assert stream.idle_s == 0

    @given(durations, st.integers(2, 10))
    def test_slices_over_max_slice_go_out_two_at_a_time(
        self, slices: list[float], factor: int
    ) -> None:
        long = [s * factor + MAX_SLICE_S for s in slices]
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        previous = 0.0
        for slice_s in launch_all(window, stream, long):
            assert window.in_flight_s <= previous + slice_s
            assert stream.idle_s == 0
            previous = slice_s

    @given(durations)
    def test_wait_returns_when_everything_has_run(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices):
            pass
        window.wait()
        assert window.in_flight_s == 0 and window.newest is None
        assert stream.clock.now_s() == stream.free_s == sum(slices)

    def test_ended_slices_are_forgotten_without_waiting(self) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, [0.002, 0.002]):
            pass
        stream.clock.advance_to(0.003)
        window.make_room()
        assert window.in_flight_s == 0.002 and stream.clock.now_s() == 0.003

    def test_the_newest_event_is_the_end_of_the_last_slice(self) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        assert window.newest is None
        for _ in launch_all(window, stream, [0.001, 0.002]):
            pass
        assert window.newest is not None
        window.newest.synchronize()
        assert stream.clock.now_s() == 0.003
        window.forget_ended()
        assert window.newest is None


class TestRecordedSlices:
    """Real slices, whose predictions are wrong as real ones are, at launch costs of 0 to 10 ms."""

    @given(stretches, launch_costs)
    def test_predicted_work_in_flight_is_bounded(
        self, slices: list[tuple[float, float]], costs: list[float]
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        previous_s = 0.0
        for (predicted_s, actual_s), cost_s in zip(slices, costs, strict=False):
            window.make_room()
            assert window.in_flight_s <= max(MAX_SLICE_S, previous_s)
            stream.clock.advance_to(stream.clock.now_s() + cost_s)
            window.launched(stream.launch(actual_s), predicted_s)
            previous_s = predicted_s

    @given(stretches, launch_costs)
    def test_the_real_backlog_exceeds_the_bound_by_the_prediction_error_at_most(
        self, slices: list[tuple[float, float]], costs: list[float]
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        error = max(actual_s / predicted_s for predicted_s, actual_s in slices)
        previous_s = 0.0
        for (predicted_s, actual_s), cost_s in zip(slices, costs, strict=False):
            window.make_room()
            stream.clock.advance_to(stream.clock.now_s() + cost_s)
            window.launched(stream.launch(actual_s), predicted_s)
            bound_s = max(MAX_SLICE_S, previous_s) + predicted_s
            assert stream.backlog_s <= error * bound_s + ROUNDING
            previous_s = predicted_s

    @given(stretches, launch_costs)
    def test_the_device_idles_only_where_a_launch_takes_longer_than_what_is_in_flight(
        self, slices: list[tuple[float, float]], costs: list[float]
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for (predicted_s, actual_s), cost_s in zip(slices, costs, strict=False):
            asked_s, idle_s = stream.clock.now_s(), stream.idle_s
            window.make_room()
            has_waited = stream.clock.now_s() > asked_s
            in_flight_s = stream.backlog_s
            # it waits only for the older of two slices: the newer one is there to run
            assert in_flight_s > 0 or not has_waited
            stream.clock.advance_to(stream.clock.now_s() + cost_s)
            window.launched(stream.launch(actual_s), predicted_s)
            missing_s = max(0.0, cost_s - in_flight_s) if stream.starts_s[1:] else 0.0
            assert stream.idle_s - idle_s <= missing_s + ROUNDING

    def test_the_recording_has_errors_and_slices_of_many_lengths(self) -> None:
        errors = [measured_s / predicted_s for predicted_s, measured_s in RECORDED]
        assert len(RECORDED) >= 300
        assert min(errors) < 0.95 and max(errors) > 1.05
        assert max(s for _, s in RECORDED) > 5 * min(s for _, s in RECORDED)

    def test_where_launches_take_longer_than_slices_the_device_waits_for_them_alone(self) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        cost_s = 2 * max(actual_s for _, actual_s in RECORDED)
        predicted, actual = map(list, zip(*RECORDED, strict=True))
        for _ in launch_all(window, stream, predicted, actual, launch_s=cost_s):
            pass
        expected_s = sum(cost_s - actual_s for actual_s in actual[:-1])
        assert stream.idle_s == pytest.approx(expected_s)


class TestNewcomers:
    @pytest.mark.parametrize("arrived_s", [n * MAX_SLICE_S / 16 for n in range(64)])
    def test_whenever_one_arrives_it_waits_one_and_a_half_max_slice_at_most(
        self, arrived_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also while the host waits for room in the window."""
        slice_s = MAX_SLICE_S / 2
        card = PretendedCard(monkeypatch, durations=itertools.repeat(slice_s))
        clock = card.stream.clock
        executor = Executor(CudaDevice(MAX_SLICE_S), clock, lambda piece: slice_s)
        patient, newcomer = LaunchedPass(20), LaunchedPass(5)
        assert not executor.run(patient, Interrupt(clock), until_s=arrived_s).is_done
        started_s = executor.run(newcomer, Interrupt(clock)).started_s
        assert started_s == card.stream.starts_s[patient.position]
        assert started_s - arrived_s <= 1.5 * MAX_SLICE_S + ROUNDING
        assert executor.run(patient, Interrupt(clock)).is_done
        assert card.stream.idle_s == 0
