import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.metrics import RequestTimes, goodput, max_goodput, percentile, slo_attainment

IN_TIME = RequestTimes(10.0, (10.3, 10.4, 10.6), ttft_slo_s=0.4, tbt_slo_s=0.25)
LATE_FIRST = RequestTimes(10.0, (10.5,), ttft_slo_s=0.4)
LATE_GAP = RequestTimes(10.0, (10.1, 10.2, 10.6), ttft_slo_s=0.4, tbt_slo_s=0.25)
NO_TOKEN = RequestTimes(10.0, ())


def test_ttft_counts_from_arrival_and_tbt_between_tokens() -> None:
    assert IN_TIME.ttft_s == pytest.approx(0.3)
    assert IN_TIME.tbt_s == pytest.approx([0.1, 0.2])
    assert IN_TIME.tpot_s == pytest.approx(0.15)


def test_a_request_without_tokens_is_infinitely_late() -> None:
    assert NO_TOKEN.ttft_s == math.inf
    assert NO_TOKEN.tpot_s is None
    assert not RequestTimes(0.0, (), ttft_slo_s=1e6).met_slo()


def test_one_late_gap_breaks_the_objective() -> None:
    assert IN_TIME.met_slo()
    assert not LATE_GAP.met_slo()
    assert not LATE_FIRST.met_slo()


def test_a_request_exactly_on_time_is_on_time() -> None:
    assert RequestTimes(0.0, (0.5, 0.75), ttft_slo_s=0.5, tbt_slo_s=0.25).met_slo()


def test_attainment_and_goodput_count_requests_that_met_everything() -> None:
    requests = [IN_TIME, IN_TIME, LATE_FIRST, LATE_GAP]
    assert slo_attainment(requests) == 0.5
    assert goodput(requests, duration_s=4.0) == 0.5
    with pytest.raises(ValueError, match="no requests"):
        slo_attainment([])
    with pytest.raises(ValueError, match="over 0"):
        goodput(requests, 0)


def test_max_goodput_ignores_a_rate_that_passes_above_one_that_failed() -> None:
    points = [(4.0, 0.95), (1.0, 1.0), (2.0, 0.9), (3.0, 0.89)]
    assert max_goodput(points) == 2.0
    assert max_goodput(points, target=0.5) == 4.0
    assert max_goodput(points, target=1.01) == 0.0


def test_percentile_interpolates_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, math.inf, math.inf], 90) == math.inf


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_it_cannot_answer(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentile_is_monotone_and_within_the_values(
    values: list[float], q1: float, q2: float
) -> None:
    low, high = sorted((percentile(values, q1), percentile(values, q2)))
    assert (low, high) == tuple(percentile(values, q) for q in sorted((q1, q2)))
    assert percentile(values, 0) == min(values) <= low <= high <= percentile(values, 100)
