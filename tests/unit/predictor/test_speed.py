"""The device-speed factor, on a device in virtual time whose speed the test sets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.clock import VirtualClock
from flowprefill.predictor.speed import BOUNDS, WINDOW, SpeedFactor
from tests.unit.predictor.shapes import make_predictor

Lengths = Callable[[random.Random], int]


def mixed(draw: random.Random) -> int:
    return round(math.exp(draw.uniform(math.log(16), math.log(8000))))


def only_short(draw: random.Random) -> int:
    return draw.randint(16, 64)


def only_long(draw: random.Random) -> int:
    return draw.randint(6000, 8000)


class Device:
    """Prefills, each predicted just before; the profile is true but for slowness and noise."""

    def __init__(self, seed: int, lengths: Lengths, noise: float = 0.04) -> None:
        self.predictor = make_predictor()
        self.clock = VirtualClock()
        self.slowness = 1.0
        self._truth = make_predictor()
        self._draw = random.Random(seed)
        self._lengths = lengths
        self._noise = noise

    def prefill(self, times_longer: float = 1.0, num_tokens: int | None = None) -> float:
        """Run one prefill. Returns the relative error of its prediction."""
        num_tokens = num_tokens or self._lengths(self._draw)
        predicted_s = self.predictor.prefill_s(num_tokens)
        started_s = self.clock.now_s()
        noise = self._draw.uniform(1 - self._noise, 1 + self._noise)
        device_s = self._truth.prefill_s(num_tokens) * self.slowness * noise * times_longer
        self.clock.advance_to(started_s + device_s)
        busy_s = self.clock.now_s() - started_s
        self.predictor.observe(busy_s, predicted_s / self.predictor.speed_factor)
        return abs(predicted_s / busy_s - 1)

    def errors(self, count: int) -> list[float]:
        return [self.prefill() for _ in range(count)]


@pytest.mark.parametrize("lengths", [mixed, only_short, only_long])
@pytest.mark.parametrize("slowness", [2.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_at_another_speed_predictions_are_right_again_within_50_prefills(
    seed: int, slowness: float, lengths: Lengths
) -> None:
    device = Device(seed, lengths)
    assert max(device.errors(60)) < 0.1
    device.slowness = slowness
    assert device.prefill() > 0.4
    device.errors(49)
    assert max(device.errors(60)) < 0.1
    device.slowness = 1.0
    device.errors(50)
    assert max(device.errors(60)) < 0.1


@pytest.mark.parametrize("num_tokens", [16, 500, 8000])
@pytest.mark.parametrize("before", [0, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("times_longer", [50.0, 0.02])
def test_one_outlier_spoils_no_later_prediction(
    times_longer: float, before: int, num_tokens: int
) -> None:
    device = Device(1, mixed)
    device.errors(before)
    device.prefill(times_longer, num_tokens)
    assert max(device.errors(60)) < 0.1


def test_an_outlier_now_and_then_spoils_no_prediction() -> None:
    device = Device(2, mixed)
    for _ in range(20):
        device.prefill(50.0)
        assert max(device.errors(9)) < 0.1


def test_many_short_stretches_that_are_mispredicted_do_not_outweigh_a_few_long_ones() -> None:
    factor = SpeedFactor()
    for _ in range(5):
        factor.observe(1.0, 1.0)  # prefills
        for _ in range(10):
            factor.observe(0.030, 0.010)  # decode steps
    assert factor.value == 1.0


def test_when_all_stretches_are_short_they_count() -> None:
    factor = SpeedFactor()
    for _ in range(WINDOW):
        factor.observe(0.0003, 0.0001)
    assert factor.value == pytest.approx(3.0)


def test_seven_stretches_of_equal_length_turn_it() -> None:
    factor = SpeedFactor()
    for _ in range(WINDOW):
        factor.observe(1.0, 1.0)
    values = []
    for _ in range(8):
        factor.observe(2.0, 1.0)
        values.append(factor.value)
    assert values == [1.0] * 6 + [2.0] * 2


def test_after_a_whole_window_nothing_is_left_of_longer_stretches() -> None:
    factor = SpeedFactor()
    for _ in range(WINDOW):
        factor.observe(3e9, 1e9)
    for _ in range(WINDOW):
        factor.observe(1e-3, 1e-3)
    assert factor.value == 1.0


def test_the_profile_is_believed_until_there_is_a_majority() -> None:
    factor = SpeedFactor()
    factor.observe(3.0, 1.0)
    factor.observe(3.0, 1.0)
    assert factor.value == 1.0
    factor.observe(3.0, 1.0)
    assert factor.value == 3.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=40))
def test_it_stays_bounded(stretches: list[tuple[float, float]]) -> None:
    factor = SpeedFactor()
    for busy_s, profiled_s in stretches:
        factor.observe(busy_s, profiled_s)
        assert BOUNDS[0] <= factor.value <= BOUNDS[1]


@pytest.mark.parametrize(
    ("busy_s", "profiled_s"), [(1.0, 0.0), (1.0, math.inf), (math.inf, 1.0), (math.nan, 1.0)]
)
def test_what_is_no_measurement_is_left_out(busy_s: float, profiled_s: float) -> None:
    factor = SpeedFactor()
    for _ in range(WINDOW):
        factor.observe(2.0, 1.0)
    for _ in range(WINDOW):
        factor.observe(busy_s, profiled_s)
    assert factor.value == 2.0
