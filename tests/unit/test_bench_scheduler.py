"""`flowprefill bench scheduler`: what is counted is what runs, and the queues are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench import decision_counts, scheduler
from flowprefill.bench.decision_counts import CountedRun, DecisionCounts, num_boundaries
from flowprefill.bench.decision_times import (
    WARM_UP_DECISIONS,
    Case,
    Deadlines,
    DecisionTimes,
    Mix,
    SteadyQueue,
    time_decisions,
)
from flowprefill.cli import app
from flowprefill.granularity import Granularity
from flowprefill.simulator.cost import LayerTimeline, PassTimeline, Stretch
from flowprefill.simulator.replay import roofline
from flowprefill.workload import TraceRequest, read_trace

TILE = Granularity("tile")
CHATS = read_trace(scheduler.TRACES / scheduler.CHAT_TRACE)[:300]


def counts_of(*requests: TraceRequest) -> tuple[CountedRun, DecisionCounts]:
    run = CountedRun(requests, "s-edf")
    run.run()
    return run, run.counts(load=0.5)


def chat(arrival_s: float, input_tokens: int, output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(arrival_s, "text", input_tokens, output_tokens)


def test_boundaries_of_a_pass_are_its_slices_and_its_end() -> None:
    assert num_boundaries(PassTimeline([0.1, 0.2, 0.3])) == 3
    layer, last = [Stretch(0.010, 0.004), Stretch(0.012, 0.002)], [Stretch(0.003, 0.003)]
    assert num_boundaries(LayerTimeline(layer, 5, last)) == 5 * 4 + 1


def test_a_prefill_alone_is_decided_on_at_its_arrival_and_its_end() -> None:
    _, counts = counts_of(chat(0.0, 1000))
    assert counts.ours == 2
    assert counts.per_step == counts.mixed_steps == {512: 2, 2048: 1}
    slices = num_boundaries(roofline(TILE).timeline([(1000, 0)], TILE))
    assert counts.every_boundary == slices > 10
    assert counts.attainment == 1


def test_each_decode_step_is_a_decision_of_the_others() -> None:
    _, one_token = counts_of(chat(0.0, 1000))
    run, counts = counts_of(chat(0.0, 1000, output_tokens=11))
    assert run.num_lone_steps == 10
    assert counts.per_step == counts.mixed_steps == {512: 2 + 10, 2048: 1 + 10}
    step_slices = num_boundaries(roofline(TILE).step_timeline(1, 1001))
    assert counts.every_boundary == one_token.every_boundary + 10 * step_slices
    assert counts.ours < 2 + 10


def test_mixed_steps_leave_out_decode_beside_prefills_and_fill_their_chunks() -> None:
    # The second prompt takes seconds, the first one's answer goes on meanwhile.
    run, counts = counts_of(chat(0.0, 100, output_tokens=20), chat(0.05, 16_200))
    num_steps = run.counters.decode_steps
    assert num_steps == 19
    assert 0 < run.num_lone_steps < num_steps
    assert counts.per_step[512] == (1 + 32 + num_steps) / 2
    assert counts.mixed_steps[512] == (32 + run.num_lone_steps) / 2


def test_tokens_found_in_the_cache_are_in_no_chunk() -> None:
    hashes = (1, 2, 3, 4)
    requests = [TraceRequest(at, "chat", 2048, 1, hashes) for at in (0.0, 100.0)]
    run, _ = counts_of(*requests)
    assert run.pass_tokens == [2048, 512]  # the last token's block is computed again


def test_prefill_only_keeps_everything_but_the_answers() -> None:
    (request,) = decision_counts.prefill_only([chat(1.5, 700, output_tokens=90)])
    assert request == chat(1.5, 700)


@pytest.mark.parametrize("mix", ["plain", "mixed", "scarce"])
def test_the_timed_queue_stays_as_long_as_asked_for(mix: Mix) -> None:
    queue = SteadyQueue(Case("goodput", 60, "crowded", mix), CHATS, 150, seed=1)
    queue.run()
    assert queue.scheduler.num_decisions == len(queue.timed.cpu_s) == 150
    # Others arrive within the next prefill; packs and evicted ones make it vary.
    assert 45 <= queue.scheduler.num_waiting <= 75
    assert len(queue.records) > 80
    queue.scheduler.check_integrity()


@pytest.mark.parametrize(("deadlines", "low", "high"), [("loose", 1, 1), ("late", 0, 0.5)])
def test_deadlines_of_the_timed_queue_are_loose_or_missed(
    deadlines: Deadlines, low: float, high: float
) -> None:
    queue = SteadyQueue(Case("edf", 60, deadlines, "plain"), CHATS, 300, seed=1)
    queue.run()
    served = [r for r in queue.records.values() if r.num_tokens]
    assert len(served) > 20
    on_time = sum(r.ttft_s <= r.arrival.ttft_slo_s for r in served) / len(served)
    assert low <= on_time <= high


def test_a_mixed_queue_has_ranks_tenants_and_shared_prefixes() -> None:
    queue = SteadyQueue(Case("edf", 60, "loose", "mixed"), CHATS, 150, seed=1)
    queue.run()
    arrivals = [record.arrival for record in queue.records.values()]
    assert len({a.rank for a in arrivals}) == 3
    assert len({a.tenant for a in arrivals}) == 8
    assert any(record.num_cached_tokens for record in queue.records.values())
    keys = [key for a in arrivals for key in a.prefix_keys[32:]]
    assert len(keys) == len(set(keys)) > 0  # what follows a beginning is nobody else's


def test_times_are_those_behind_the_warm_up() -> None:
    times = time_decisions(Case("s-edf", 20, "late", "plain"), CHATS, 30, seed=0)
    assert len(times.cpu_s) == len(times.wall_s) == 30
    assert WARM_UP_DECISIONS > 0
    assert all(seconds > 0 for seconds in times.cpu_s)


def test_the_reported_p99_is_that_of_the_worst_queue() -> None:
    def times(ms: float) -> DecisionTimes:
        return DecisionTimes([ms / 1000] * 3, [ms / 500] * 3)

    result = scheduler.summarise_times(
        {
            Case("edf", 10, "loose", "plain"): times(1),
            Case("edf", 10, "late", "mixed"): times(3),
            Case("fcfs", 10, "late", "mixed"): times(2),
            Case("fcfs", 50, "late", "mixed"): times(7),
        }
    )
    assert result["decision_p99_ms_10"] == 3
    assert result["decision_p99_ms_50"] == 7
    edf = result["decision_times"]["10"]["edf"]
    assert edf == {
        "worst_queue": "late, mixed",
        "p50_ms": 3,
        "p99_ms": 3,
        "wall_p99_ms": 6,
        "p99_ms_by_queue": {"loose, plain": 1, "late, mixed": 3},
    }
    assert scheduler.times_table(result["decision_times"]).row_count == 3


def test_the_command_ends_with_the_agreed_json(tmp_path: Path) -> None:
    json_out = tmp_path / "scheduler.json"
    arguments = ["bench", "scheduler", "--decisions", "20", "--waiting", "30", "--waiting", "40",
                 "--requests", "60", "--json-out", str(json_out)]  # fmt: skip
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert json.loads(json_out.read_text()) == result
    assert result["decision_p99_ms_30"] > 0 and result["decision_p99_ms_40"] > 0
    for counts in (result, result["mooncake_prefill_only"]):
        assert counts["decisions_per_request"] > 0
        assert (
            counts["other_schedulers"]["per_step_512"] == (counts["decisions_per_request_per_step"])
        )
        assert counts["decisions_per_request"] < counts["decisions_per_request_every_boundary"]
    assert set(result["run"]) >= {"cpu", "seed", "commit", "decisions"}
