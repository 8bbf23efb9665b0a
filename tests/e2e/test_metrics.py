"""The model's own metrics on tritonserver's page, over all that can become of a request."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.bench.metrics_page import ENDS, MetricsPage
from flowprefill.server import TritonServer
from flowprefill_backend.metric_families import Family, make_families
from flowprefill_client import Client, ServerError
from tests.e2e.conftest import MODEL, group_members
from tests.live_server import unload
from tests.metrics_page import page_of, settled

NAME = "metered"
MAX_MODEL_LEN = 2048
PROMPT = "The capital of France is"
ENDLESS = {"ignore_eos": True, "temperature": 0}


@pytest.fixture
def metered(http: Any, server: TritonServer, repository: Path) -> Iterator[tuple[Client, int]]:
    """A model of its own, whose requests and engine nobody else counts or kills; and its engine's
    process."""
    shutil.copytree(repository / MODEL, repository / NAME)
    path = repository / NAME / "1" / "model.json"
    settings = {"on_infeasible": "reject", "max_model_len": MAX_MODEL_LEN}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    others = engine_pids(server)
    http.load_model(NAME)
    (engine_pid,) = engine_pids(server) - others
    with Client(server.grpc_url, NAME) as client:
        yield client, engine_pid
    unload(http, NAME)


def engine_pids(server: TritonServer) -> set[int]:
    members = group_members(server.pid).items()
    return {pid for pid, command in members if "flowprefill.engine_server" in command}


def assert_described(page: MetricsPage, family: Family) -> None:
    if family.name != "flowprefill_slo_attainment_ratio":  # nothing is judged yet
        assert page.kinds[family.name] == family.kind.lower()
    if family.kind == "HISTOGRAM":
        bounds = {float(dict(labels)["le"]) for name, labels in page.values
                  if name == f"{family.name}_bucket"}  # fmt: skip
        assert bounds == {*family.buckets, float("inf")}


def test_sums_agree_after_load_and_over_the_engine_s_death(
    server: TritonServer, metered: tuple[Client, int]
) -> None:
    client, engine_pid = metered
    page = page_of(server, NAME)  # complete when the model is ready
    for family in make_families(MAX_MODEL_LEN):
        assert_described(page, family)
    assert page.requests("started") == 0 and page.gauges() == dict.fromkeys(page.gauges(), 0)

    for _ in range(3):
        client.generate(PROMPT, max_tokens=4, ttft_slo_ms=60_000, sampling=ENDLESS)
    client.generate(PROMPT, max_tokens=1, slo_class="document")
    with client.stream(PROMPT, max_tokens=1500, sampling=ENDLESS) as stream:
        next(stream)
        with pytest.raises(ServerError, match="on_infeasible"):  # not if nobody else is there
            client.generate(PROMPT, ttft_slo_ms=1e-3)
    with pytest.raises(ServerError, match="top_p"):
        client.generate(PROMPT, sampling={"top_p": 7})

    def is_at_rest(page: MetricsPage) -> bool:
        return page.requests("started") == 7 and not any(page.gauges().values())

    page = settled(server, NAME, is_at_rest, "seven requests have their ends on the page")
    assert page.num_lost() == 0
    assert [page.requests(end) for end in ENDS] == [4, 1, 2, 0]
    assert page.value("flowprefill_requests_rejected_total", reason="invalid") == 1
    assert page.value("flowprefill_requests_rejected_total", reason="infeasible") == 1
    # four finished ones and the cancelled one; what was rejected has no TTFT
    assert page.total("vllm:time_to_first_token_seconds_count") == 5
    by_class = "flowprefill_time_to_first_token_seconds_count"
    assert page.value(by_class, slo_class="default") == 4
    assert page.value(by_class, slo_class="document") == 1
    assert page.total("flowprefill_queue_seconds_count") == 5
    assert page.total("vllm:time_to_first_token_seconds_sum") >= page.total(
        "flowprefill_queue_seconds_sum"
    )
    assert page.value("flowprefill_requests_judged_total", slo_class="default") == 5
    on_time = page.value("flowprefill_requests_on_time_total", slo_class="default")
    assert 3 <= on_time <= 4
    ratio = page.value("flowprefill_slo_attainment_ratio", slo_class="default")
    assert ratio == pytest.approx(on_time / 5)
    assert page.total("vllm:e2e_request_latency_seconds_count") == 4
    assert page.total("vllm:request_generation_tokens_sum") == 13
    num_gaps = page.total("vllm:time_per_output_token_seconds_count")
    assert page.value("vllm:generation_tokens_total") == num_gaps + 5 >= 14
    assert page.value("vllm:prompt_tokens_total") == 5 * 5
    stats = client.engine_stats()
    assert page.value("flowprefill_decisions_total") == stats["num_decisions"]
    assert page.value("flowprefill_prefill_prediction_error_ratio_count") == 5

    stream = client.stream(PROMPT, max_tokens=1500, sampling=ENDLESS)
    next(stream)
    running = settled(server, NAME, lambda p: p.value("vllm:num_requests_running") == 1, "it runs")
    assert running.num_lost() == 0 and running.value("flowprefill_requests_live") == 1
    assert running.value("vllm:kv_cache_usage_perc") > 0
    os.kill(engine_pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="engine process"):
        list(stream)
    client.generate(PROMPT, max_tokens=4, sampling=ENDLESS)  # waits for the next engine

    def is_over(page: MetricsPage) -> bool:
        return page.requests("finished") == 5 and not any(page.gauges().values())

    after = settled(server, NAME, is_over, "the restart is on the page")
    assert after.num_lost() == 0 and after.requests("started") == 9
    assert [after.requests(end) for end in ENDS] == [5, 1, 2, 1]
    assert after.value("flowprefill_engine_restarts_total") == 1
    assert after.value("flowprefill_engine_ready") == 1
    counters = [key for key in page.values if key[0].endswith(("_total", "_count", "_sum"))]
    assert all(after.values[key] >= page.values[key] for key in counters)
    assert after.value("flowprefill_decisions_total") > page.value("flowprefill_decisions_total")
