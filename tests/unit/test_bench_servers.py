"""`bench servers`: what it does with a server, and what it concludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill.bench.goodput_outcomes import CellResult, Outcome, OutcomeStore
from flowprefill.bench.goodput_plan import GoodputPlan
from flowprefill.bench.pace import Pace
from flowprefill.bench.peers.spec import Conditions, PeerSpec
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.server_contenders import peer_contender
from flowprefill.bench.server_report import Results, make_tables, summarise
from flowprefill.bench.server_runs import MOMENTS, Contender, ServerRuns
from flowprefill.bench.simulate_plan import Window
from flowprefill.replay.prompts import COMMON_WORDS, PromptMaker
from flowprefill.simulator.platform import PAPER_PLATFORM
from flowprefill.workload import Objective, TraceRequest
from tests.stand_in_server import write_stand_in_server

GOAL = Objective("text", 5.0, 1.0)
CONDITIONS = Conditions(100, "float32", num_threads=1, max_model_len=8192)


def encode(text: str) -> list[int]:
    return [COMMON_WORDS.index(word) for word in text.split()]


TOKENS_PER_S = 8000
"""So slow that a moment of a busy machine is little of what the long prompt takes."""
PACE = Pace(lambda: 1.0, 1.0)
"""Of a machine that is always as fast as its profile."""


@pytest.fixture
def plan() -> GoodputPlan:
    requests = [TraceRequest(0.05 * i, "text", 100 + i, 1) for i in range(6)]
    window = Window(requests, [GOAL] * len(requests))
    return GoodputPlan(PAPER_PLATFORM, window, 3, {}, frozenset(), frozenset(), 1.0)


@pytest.fixture
def progress() -> Iterator[BenchProgress]:
    with bench_progress(None) as progress:
        yield progress


@pytest.fixture
def peer(tmp_path: Path) -> Contender:
    spec = PeerSpec("peer", write_stand_in_server(tmp_path, TOKENS_PER_S), tmp_path, "vllm")
    return peer_contender(spec, CONDITIONS, (1.0, 1.0))


def test_a_server_is_measured_once_and_ends(
    plan: GoodputPlan, peer: Contender, progress: BenchProgress, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    runs = ServerRuns(plan, PromptMaker(encode, 0), progress, OutcomeStore(path, "key"), PACE)
    try:
        outcomes = runs.measure(peer, 1.0)
        rounds = runs.meet(peer, 1)
    finally:
        runs.close()
    assert [o.num_by_class for o in outcomes] == [{"text": 2}] * 3
    assert all(o.num_on_time == 2 for o in outcomes)
    assert runs.versions == {"peer": "vllm stand-in"}
    for outcome in rounds:
        assert outcome.num_by_class["short alone"] == len(MOMENTS)
        assert outcome.num_by_class["long alone"] == 1
        (long_s,) = outcome.ttft_by_class["long alone"]
        assert long_s > max(outcome.ttft_by_class["short at 50%"])  # it serves all side by side
    again = ServerRuns(plan, PromptMaker(encode, 0), progress, OutcomeStore(path, "key"), PACE)
    assert again.measure(peer, 1.0) == outcomes
    assert again.meet(peer, 1) == rounds
    assert again.versions == {}  # it was not started
    other = dataclasses.replace(peer, settings='{"max_num_seqs": 1}')
    assert other.key != peer.key  # what has its name alone is not its outcome


def test_a_server_that_counts_other_tokens_is_refused(
    plan: GoodputPlan, peer: Contender, progress: BenchProgress
) -> None:
    def encode_with_bos(text: str) -> list[int]:
        return [1000, *encode(text)]

    maker = PromptMaker(encode_with_bos, 0)
    runs = ServerRuns(plan, maker, progress, OutcomeStore(None, "key"), PACE)
    try:
        with pytest.raises(BenchmarkError, match="a prompt of 64 tokens has 63 on the server"):
            runs.measure(peer, 1.0)
    finally:
        runs.close()


def test_a_slow_machine_has_longer_seconds(plan: GoodputPlan) -> None:
    """Half as fast: everything comes half as fast, and has twice the time."""
    usual, usual_goals = plan.offered(1.0, 0.5)
    slow, slow_goals = plan.offered(1.0, 0.5, slowdown=2.0)
    spans = [r[-1].arrival_s - r[0].arrival_s for r in (usual, slow)]
    assert spans[1] == pytest.approx(2 * spans[0])
    for goal, slow_goal in zip(usual_goals, slow_goals, strict=True):
        assert slow_goal.ttft_s == 2 * goal.ttft_s
        assert slow_goal.tbt_s == 2 * goal.tbt_s


def outcomes(on_time: int, lag_s: float = 0.0) -> list[Outcome]:
    """Three blocks of ten requests."""
    ttft = {"text": [0.1] * 10}
    return [Outcome({"text": 10}, {"text": on_time}, ttft, [], [lag_s] * 10) for _ in range(3)]


def test_ratios_are_of_ours_to_each_peer_and_late_replays_are_named(plan: GoodputPlan) -> None:
    def result(highest: float, lag_s: float = 0.0) -> CellResult:
        return CellResult({highest: outcomes(9, lag_s), 1.1 * highest: outcomes(5, lag_s)})

    meeting = [
        Outcome(
            ttft_by_class={
                name: [0.1, 0.3]
                for moment in ("alone", *(f"at {m:.0%}" for m in MOMENTS))
                for name in (f"short {moment}", f"long {moment}")
            }
        )
    ]
    results = Results(
        {"ours": result(2.0), "slow": result(0.5), "late": result(1.0, lag_s=0.02)},
        {"ours": meeting},
        {"ours": "1.0"},
    )
    found = summarise(plan, results, ["ours"], ["slow", "late"], seed=0)
    assert found["ratio"]["ours"]["slow"] == [4.0, 4.0, 4.0]
    assert found["ratio_every_class"]["ours"]["late"][0] == 2.0
    assert found["void"] == ["late"]
    assert found["send_lag_p99_ms"]["late"] == 20.0
    assert found["short_behind_long"]["ours"]["short at 10%"] == {"p50": 0.2, "max": 0.3}
    assert [table.row_count for table in make_tables(plan, found)] == [3, 1, 6, 0]
