"""What requests and the engine mean on the metrics page, with the server's side imitated."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.config import EngineConfig, SLOClass
from flowprefill.engine_process import EngineState
from flowprefill.errors import QueueFullError, UnavailableError
from flowprefill.request import FinishReason, PrefillTiming
from flowprefill.stats import EngineStats
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend import metrics as metrics_module
from flowprefill_backend.claim import Claim
from flowprefill_backend.metric_families import REJECT_REASONS, make_families
from flowprefill_backend.metrics import Metrics
from flowprefill_backend.metrics_page import MetricsPage
from flowprefill_backend.request_counts import Tally
from flowprefill_backend.triton_model import open_page
from tests.backend import fake_pb_utils
from tests.backend.conftest import Harness
from tests.backend.fake_pb_utils import WAIT_S, ResponseSender

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
LABEL_VALUES = {"slo_class": ("default",), "reason": REJECT_REASONS}
ARGS = {"model_name": "m", "model_version": "1"}
CONFIG = EngineConfig(model="tiny", slo_classes=(SLOClass("chat", ttft_slo_ms=60_000),))


class Board:
    """A harness with a page that is brought up to date by hand."""

    def __init__(self, tokenizer: Tokenizer, claim: Claim | None = None) -> None:
        self.harness = Harness(
            tokenizer,
            make_page=lambda info: open_page(ARGS, {}, CONFIG, info),
            claim=claim,
            slo_classes=CONFIG.slo_classes,
        )
        self.engine = self.harness.engine
        self.engine.now = EngineStats()
        self.metrics: Metrics = self.harness.instance._metrics  # type: ignore[assignment]
        self.page: MetricsPage = self.metrics._page
        self.metrics._closing.set()  # its thread ends; update() is called here
        self.metrics._thread.join(WAIT_S)

    def update(self) -> None:
        """Once all answers that were posted are sent."""
        lanes = [threading.Event() for _ in self.harness.instance._senders]
        for sender, lane in zip(self.harness.instance._senders, lanes, strict=True):
            sender.post(lane.set)
            assert lane.wait(WAIT_S)
        self.metrics.update()

    def series(self, name: str, **labels: str) -> fake_pb_utils.Metric:
        key = tuple(sorted({"model": "m", "version": "1", **labels}.items()))
        found: fake_pb_utils.Metric = self.page._server_families[name].series[key]
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.series(name, **labels).number

    def requests(self, end: str, **labels: str) -> float:
        return self.value(f"flowprefill_requests_{end}_total", **labels)

    def send(self, inputs: dict[str, Any] | None = None, **parameters: Any) -> ResponseSender:
        return self.harness.send({"text_input": "a", **(inputs or {})}, parameters)

    def submit(self, **parameters: Any) -> tuple[int, ResponseSender]:
        count = len(self.engine.submitted) + 1
        sender = self.send({"stream": True}, **parameters)
        return self.engine.wait_submitted(count).req_id, sender


@pytest.fixture
def board(tokenizer: Tokenizer) -> Iterator[Board]:
    board = Board(tokenizer)
    yield board
    board.harness.instance.close()


def test_sums_agree_whatever_becomes_of_requests(board: Board) -> None:
    ok, ok_sender = board.submit(slo_class="chat")
    board.engine.say(ok, 5)
    board.engine.say(ok, 6, FinishReason.LENGTH)
    cancelled, cancelled_sender = board.submit()
    board.engine.say(cancelled, 5)
    board.engine.end(cancelled, FinishReason.CANCELLED)
    dead, dead_sender = board.submit()
    board.engine.say(dead, 5)
    board.engine.end(dead, FinishReason.ERROR, "UNAVAILABLE", "engine process 7 was killed")
    refused_senders = []
    for reason in ("queue_timeout", "infeasible"):
        refused, sender = board.submit()
        board.engine.end(refused, FinishReason.ERROR, "UNAVAILABLE", "no", reason)
        refused_senders.append(sender)
    invalid = [board.send(top_p=7), board.send({"image": "x"}), board.send(cancel_id=1.5)]
    control = board.send(engine_stats=True)
    board.submit()  # stays
    board.engine.submit_error = QueueFullError("full")
    full = board.send()
    for sender in (ok_sender, cancelled_sender, dead_sender, *refused_senders, *invalid, control,
                   full):  # fmt: skip
        sender.wait_final()
    board.update()
    rejected = {reason: board.requests("rejected", reason=reason) for reason in REJECT_REASONS}
    assert rejected == {
        "invalid": 2, "unsupported": 1, "queue_full": 1, "queue_timeout": 1, "infeasible": 1,
        "unavailable": 0,
    }  # fmt: skip
    ends = (board.requests("finished"), board.requests("cancelled"), board.requests("failed"))
    assert ends == (1, 1, 1)
    assert board.value("flowprefill_requests_live") == 1
    assert board.requests("started") == sum(ends) + sum(rejected.values()) + 1 == 10


def test_on_time_is_judged_once_it_is_decided(board: Board) -> None:
    def counts(slo_class: str) -> tuple[float, float]:
        board.update()
        return (
            board.requests("judged", slo_class=slo_class),
            board.requests("on_time", slo_class=slo_class),
        )

    def finish(**parameters: Any) -> None:
        req_id, sender = board.submit(**parameters)
        board.engine.say(req_id, 5, FinishReason.LENGTH)
        sender.wait_final()

    finish(slo_class="chat")
    finish(slo_class="chat", ttft_slo_ms=1e-3)
    assert counts("chat") == (2, 1)
    assert board.value("flowprefill_slo_attainment_ratio", slo_class="chat") == 0.5

    req_id, _ = board.submit()  # its client leaves before anything is decided
    board.engine.end(req_id, FinishReason.CANCELLED)
    req_id, _ = board.submit()  # on time, and then it fails
    board.engine.say(req_id, 5)
    board.engine.end(req_id, FinishReason.ERROR, "INTERNAL", "broke")
    board.send(top_p=7).wait_final()
    assert counts("default") == (1, 0)

    req_id, _ = board.submit(ttft_slo_ms=1e-3)  # its client leaves when it is too late
    board.engine.end(req_id, FinishReason.CANCELLED)
    assert counts("default") == (2, 0)
    assert counts("other") == (0, 0)


def test_times_and_tokens_of_a_request_are_observed_where_they_are_known(board: Board) -> None:
    req_id, sender = board.submit(slo_class="chat")
    arrival_s = board.engine.submitted[req_id].arrival_s
    prefill = PrefillTiming(arrival_s + 0.5, 0.25, 0.2, num_cached_tokens=0, blocking_s=0.003)
    board.engine.say(req_id, 5, prefill=prefill)
    board.engine.say(req_id, 6)
    board.engine.say(req_id, 7, FinishReason.LENGTH)
    sender.wait_final()
    board.update()

    def observed(name: str, **labels: str) -> list[float]:
        return board.series(name, **labels).observed

    assert observed("flowprefill_queue_seconds", slo_class="chat") == [pytest.approx(0.5)]
    assert observed("flowprefill_blocking_seconds") == [0.003]
    error = observed("flowprefill_prefill_prediction_error_ratio")
    assert error == [pytest.approx(0.2)]
    ttft = observed("flowprefill_time_to_first_token_seconds", slo_class="chat")
    assert ttft == observed("vllm:time_to_first_token_seconds") and 0 < ttft[0] < WAIT_S
    assert len(observed("vllm:time_per_output_token_seconds")) == 2
    assert observed("vllm:e2e_request_latency_seconds")[0] > ttft[0]
    num_prompt = len(board.harness.tokenizer.encode("a"))
    assert observed("vllm:request_prompt_tokens") == [num_prompt]
    assert observed("vllm:request_generation_tokens") == [3]
    assert board.value("vllm:prompt_tokens_total") == num_prompt
    assert board.value("vllm:generation_tokens_total") == 3


def test_ttft_counts_no_request_that_never_got_a_token(board: Board) -> None:
    req_id, sender = board.submit()
    board.engine.end(req_id, FinishReason.ERROR, "UNAVAILABLE", "no", "infeasible")
    sender.wait_final()
    board.update()
    assert board.series("vllm:time_to_first_token_seconds").observed == []


def test_engine_counters_go_on_over_a_restart(board: Board) -> None:
    board.engine.now = EngineStats(since_s=1.0, num_decisions=10, decision_seconds_total=0.5)
    board.submit()
    board.update()
    board.engine.now = EngineStats(since_s=1.0, num_decisions=15, decision_seconds_total=0.75)
    board.update()
    assert board.value("flowprefill_decisions_total") == 15

    board.engine.state = EngineState.RESTARTING
    board.update()
    assert board.value("flowprefill_engine_ready") == 0
    assert board.value("vllm:num_requests_waiting") == 1
    board.engine.state, board.engine.num_restarts = EngineState.READY, 1
    board.engine.now = EngineStats(since_s=2.0, num_decisions=20, decision_seconds_total=0.25)
    board.update()
    assert board.value("flowprefill_decisions_total") == 35
    assert board.value("flowprefill_decision_seconds_total") == 1.0
    assert board.value("flowprefill_engine_restarts_total") == 1
    assert board.value("flowprefill_engine_ready") == 1


def test_gauges_are_the_engine_s_and_are_followed_until_it_rests(board: Board) -> None:
    req_id, _ = board.submit()
    board.engine.now = EngineStats(
        num_waiting=4, num_prefilling=2, num_decoding=3, num_kv_blocks_used=5, pass_bytes=100
    )
    board.update()

    def gauges() -> list[float]:
        blocks = [
            board.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
            for kind in ("used", "free", "max", "tokens_per", "fraction")
        ]
        names = ("waiting", "running")
        return [
            *(board.value(f"vllm:num_requests_{name}") for name in names),
            board.value("vllm:kv_cache_usage_perc"),
            *blocks,
            board.value("flowprefill_parked_bytes"),
        ]

    assert gauges() == [4, 5, 0.5, 5, 5, 10, 16, 0.5, 100]
    board.engine.end(req_id, FinishReason.CANCELLED)
    board.update()  # the client has its end, the pass goes on
    assert gauges()[-1] == 100
    board.engine.now = EngineStats()
    board.update()
    assert gauges() == [0, 0, 0, 0, 10, 10, 16, 0, 0]
    num_asked = board.engine.num_asked
    board.update()
    assert board.engine.num_asked == num_asked, "an idle engine is let alone"


def test_counters_are_there_before_they_count(board: Board) -> None:
    board.update()
    for reason in REJECT_REASONS:
        assert board.requests("rejected", reason=reason) == 0
    for name in ("default", "chat", "other"):
        family = "flowprefill_time_to_first_token_seconds"
        assert board.series(family, slo_class=name).observed == []


@pytest.mark.parametrize("is_wanted", [False, True])
def test_metrics_may_be_unwanted_or_impossible_and_requests_are_served(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    monkeypatch.setattr(fake_pb_utils.MetricFamily, "is_supported", False)
    settings = {} if is_wanted else {"REPORT_CUSTOM_METRICS": {"string_value": "no"}}

    def make_page(info: Any) -> Any:
        return open_page(ARGS, {"parameters": settings}, CONFIG, info)

    harness = Harness(tokenizer, make_page=make_page)
    sender = harness.send({"text_input": "a"})
    harness.engine.say(harness.engine.wait_submitted().req_id, 5, FinishReason.LENGTH)
    assert sender.error is None
    harness.instance.close()
    warnings = [line for line in harness.log.lines if "metrics not supported" in line]
    assert len(warnings) == is_wanted


def test_a_failing_page_is_told_once_and_does_not_end_the_thread(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "INTERVAL_S", 0.001)
    calls = threading.Semaphore(0)

    class BrokenPage(MetricsPage):
        def set(self, *_: object) -> None:
            calls.release()
            raise RuntimeError("gone")

    errors: list[Exception] = []
    args = (board.engine, board.harness.instance.info, lambda: 0, errors.append)
    broken = Metrics(BrokenPage(make_families(100), {}, LABEL_VALUES), Tally(), *args)
    assert all(calls.acquire(timeout=WAIT_S) for _ in range(50))
    broken.close(WAIT_S)
    assert [str(error) for error in errors] == ["gone"]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_call_that_the_server_did_not_take_is_made_up_for(
    board: Board, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Each of the calls of an update fails once: afterwards the page is complete all the same."""
    increment = fake_pb_utils.Metric.increment
    req_id, sender = board.submit(slo_class="chat")
    board.engine.say(req_id, 5, FinishReason.LENGTH)
    sender.wait_final()
    board.engine.now = EngineStats(num_decisions=10, num_prefilling=1)
    failed: set[int] = set()

    def fail_once(metric: fake_pb_utils.Metric, by: float) -> None:
        if id(metric) not in failed and (is_first or len(failed) % 2):
            failed.add(id(metric))
            raise RuntimeError("the queue is full")
        failed.add(id(metric))
        increment(metric, by)

    monkeypatch.setattr(fake_pb_utils.Metric, "increment", fail_once)
    board.update()
    assert failed
    board.engine.now = EngineStats(num_decisions=10)
    board.update()
    assert board.requests("started") == board.requests("finished") == 1
    assert board.requests("on_time", slo_class="chat") == 1
    assert board.value("flowprefill_requests_live") == 0
    assert board.value("flowprefill_decisions_total") == 10
    assert board.value("vllm:generation_tokens_total") == 1


def test_an_observation_that_the_server_did_not_take_is_made_up_for(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of an update fails once: afterwards all are there, and each is there once."""
    observe = fake_pb_utils.Metric.observe
    req_id, sender = board.submit(slo_class="chat")
    for token_id in range(5, 9):
        board.engine.say(req_id, token_id)
    board.engine.say(req_id, 9, FinishReason.LENGTH)
    sender.wait_final()
    failed: set[int] = set()

    def fail_once(metric: fake_pb_utils.Metric, value: float) -> None:
        if id(metric) not in failed:
            failed.add(id(metric))
            raise RuntimeError("the queue is full")
        observe(metric, value)

    monkeypatch.setattr(fake_pb_utils.Metric, "observe", fail_once)
    board.update()
    assert failed
    for _ in range(2):
        board.update()
        ttft = "time_to_first_token_seconds"
        assert len(board.series(f"flowprefill_{ttft}", slo_class="chat").observed) == 1
        assert len(board.series(f"vllm:{ttft}").observed) == 1
        assert len(board.series("vllm:time_per_output_token_seconds").observed) == 4
        assert board.series("vllm:request_generation_tokens").observed == [5]


def test_of_observations_that_the_server_never_takes_the_latest_are_kept(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(metric: fake_pb_utils.Metric, value: float) -> None:
        raise RuntimeError("the queue is full")

    monkeypatch.setattr(metrics_module, "MAX_UNOBSERVED", 3)
    with monkeypatch.context() as patch:
        patch.setattr(fake_pb_utils.Metric, "observe", refuse)
        for gap_s in range(5):
            board.metrics._tally.add({}, [(("vllm:time_per_output_token_seconds",), gap_s)])
            board.update()
    board.update()
    assert board.series("vllm:time_per_output_token_seconds").observed == [2, 3, 4]


def say_nothing() -> EngineStats:
    raise UnavailableError("no stats from the engine in 2 s")


def load_of(board: Board) -> dict[str, float]:
    """What routers go by."""
    names = ("vllm:num_requests_waiting", "vllm:num_requests_running",
             "vllm:kv_cache_usage_perc", "flowprefill_engine_ready")  # fmt: skip
    return {name.rsplit("_", 1)[1]: board.value(name) for name in names}


def test_an_engine_that_does_not_answer_is_asked_again(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be slow only: until it says so, it holds what it held."""
    board.submit()
    board.submit()
    busy = {"num_decoding": 1, "num_waiting": 1, "num_kv_blocks_used": 5}
    board.engine.now = EngineStats(num_decisions=4, **busy)
    board.update()
    before = {"waiting": 1, "running": 1, "perc": 0.5, "ready": 1}
    assert load_of(board) == before
    with monkeypatch.context() as patch:
        patch.setattr(board.engine, "stats", say_nothing)
        board.update()
        assert load_of(board) == before
        board.submit()
        board.update()
        assert load_of(board) == {**before, "waiting": 2}, "what came since waits"
    board.engine.now = EngineStats(num_decisions=10, num_kv_blocks_used=1)
    board.update()
    assert load_of(board) == {"waiting": 0, "running": 0, "perc": 0.1, "ready": 1}
    assert board.value("flowprefill_decisions_total") == 10


def test_an_engine_that_was_replaced_holds_nothing_of_what_the_dead_one_held(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its restart was over before the next look, and it does not answer yet."""
    board.submit()
    board.engine.now = EngineStats(since_s=1.0, num_decoding=1, num_kv_blocks_used=5)
    board.update()
    monkeypatch.setattr(board.engine, "stats", say_nothing)
    board.engine.num_restarts = 1
    for _ in range(2):
        board.update()
        assert load_of(board) == {"waiting": 1, "running": 0, "perc": 0, "ready": 1}


def gauges_of(board: Board) -> dict[str, set[float]]:
    families = board.page._server_families.values()
    return {
        family.name: {series.number for series in family.series.values()}
        for family in families
        if family.kind == fake_pb_utils.MetricFamily.GAUGE
        and family.name != "flowprefill_slo_attainment_ratio"
    }


def test_a_model_that_is_unloaded_leaves_all_its_counts_and_no_gauge(board: Board) -> None:
    board.engine.now = EngineStats(num_decisions=1, num_decoding=1, num_kv_blocks_used=3)
    _, sender = board.submit()
    board.update()
    assert board.value("flowprefill_engine_ready") == board.value("flowprefill_requests_live") == 1
    board.engine.now = EngineStats(num_decisions=7, num_kv_blocks_used=3)
    board.harness.instance.close()
    assert sender.error is not None
    assert board.requests("started") == board.requests("rejected", reason="unavailable") == 1
    assert board.value("flowprefill_decisions_total") == 7
    gauges = gauges_of(board)
    assert gauges == {name: {0} for name in gauges}


def test_the_gauges_are_those_of_the_instance_that_was_loaded_last(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    old = Board(tokenizer, Claim(tmp_path, "m", "1"))
    _, sender = old.submit()
    old.update()
    Claim(tmp_path, "m", "1").take()
    assert old.harness.instance.is_replaced
    old.engine.now = EngineStats(num_kv_blocks_used=3)
    old.update()
    old.harness.instance.close()
    sender.wait_final()
    assert old.value("vllm:kv_cache_usage_perc") == 0
    assert old.value("flowprefill_engine_ready") == 1, "as the new one has it"
    assert old.value("flowprefill_requests_live") == 0, "each takes its own away"
    assert old.requests("started") == 1


def test_a_claim_of_a_process_that_has_ended_is_none(tmp_path: Path) -> None:
    claim = Claim(tmp_path, "a/b", "1")
    assert not claim.is_lost
    claim.take()
    assert not claim.is_lost
    with subprocess.Popen(["true"]) as ended:
        pass
    (path,) = tmp_path.iterdir()
    path.write_text(f"{ended.pid} 5")
    assert not claim.is_lost
    Claim(tmp_path, "a/b", "2").take()
    assert not claim.is_lost
    Claim(tmp_path, "a/b", "1").take()
    assert claim.is_lost


def test_gauges_are_sent_again(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another instance that ends has set does not stay."""
    board.series("flowprefill_engine_ready").set(0)
    board.page.refresh()
    assert board.value("flowprefill_engine_ready") == 1


def test_of_several_models_one_may_have_orca_s_gauges(tokenizer: Tokenizer) -> None:
    settings = {"parameters": {"REPORT_ORCA_METRICS": {"string_value": "no"}}}
    pages: list[MetricsPage] = []

    def make_page(info: Any) -> Any:
        pages.append(open_page(ARGS, settings, CONFIG, info))  # type: ignore[arg-type]
        return pages[-1]

    harness = Harness(tokenizer, make_page=make_page)
    harness.instance.close()
    names = set(pages[0]._server_families)
    assert {family.name for family in make_families(100)} - names == {
        "nv_trt_llm_kv_cache_block_metrics"
    }
    assert not any("unexpected" in line for line in harness.log.lines)


def test_page_says_what_each_family_is() -> None:
    """docs/metrics.md has a row for each family, with its kind and labels, and no others."""
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    families = make_families(2048)
    assert documented == {f.name: (f.kind.lower(), set(f.labels)) for f in families}
    assert len({f.name for f in families}) == len(families)
    for family in families:
        assert bool(family.buckets) == (family.kind == "HISTOGRAM")
        assert list(family.buckets) == sorted(set(family.buckets))
    (lengths,) = [f.buckets for f in families if f.name == "vllm:request_prompt_tokens"]
    assert lengths == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
