from __future__ import annotations

import pytest

from flowprefill.bench.metrics_page import MetricsPage

TEXT = """\
# TYPE flowprefill_requests_started_total counter
flowprefill_requests_started_total{model="m",version="1"} 9
flowprefill_requests_started_total{model="other",version="1"} 100
# TYPE flowprefill_requests_rejected_total counter
flowprefill_requests_rejected_total{model="m",reason="invalid",version="1"} 2
flowprefill_requests_rejected_total{model="m",reason="queue_full",version="1"} 1
flowprefill_requests_finished_total{model="m",version="1"} 3
flowprefill_requests_live{model="m",version="1"} 2
nv_cpu_utilization 0.5
"""


def test_samples_are_those_of_the_model() -> None:
    page = MetricsPage(TEXT, "m")
    assert page.requests("started") == 9
    assert page.value("flowprefill_requests_rejected_total", reason="queue_full") == 1
    assert page.requests("rejected") == 3
    assert page.kinds["flowprefill_requests_started_total"] == "counter"


def test_counters_without_a_sample_are_0_and_gauges_without_one_are_an_error() -> None:
    page = MetricsPage(TEXT, "m")
    assert page.requests("failed") == 0
    with pytest.raises(KeyError):
        page.value("vllm:num_requests_running")
    with pytest.raises(KeyError):
        page.gauges()


def test_a_request_without_an_end_is_lost_unless_it_lives() -> None:
    assert MetricsPage(TEXT, "m").num_lost() == 9 - 3 - 3 - 2
