"""Clusters: one replica is the simulator, more serve more, and nothing is lost or kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowprefill.granularity import Granularity
from flowprefill.scheduler.scheduler import SchedulerOptions
from flowprefill.simulator.cluster import Cluster
from flowprefill.simulator.offered import repeat
from flowprefill.simulator.profiled import DeviceTimes, ProfiledPlatform
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.simulator.router import ROUTERS
from flowprefill.workload import (
    Objective,
    TraceRequest,
    clip_lengths,
    objective,
    read_trace,
    scale_rate,
    window,
)
from tests.unit.predictor.shapes import LIMITS, NUM_LAYERS, TRUTH

TRACES = Path(__file__).parents[3] / "clients" / "traces"
QWEN = clip_lengths(read_trace(TRACES / "qwentrace_like_synthetic_10min.csv"), 1_000_000, 1)


def trace(name: str, num_requests: int, output_tokens: int = 1) -> list[TraceRequest]:
    requests = window(read_trace(TRACES / f"{name}.csv"), 0, num_requests)
    return clip_lengths(requests, 1_000_000, output_tokens)


def setup(granularity: str = "tile", policy: str = "s-edf") -> Setup:
    return Setup(policy, Granularity.parse(granularity))


def run(
    requests: Sequence[TraceRequest],
    num_replicas: int = 1,
    router: str = "least-load",
    num_requests: int | None = None,
    setup: Setup = setup(),  # noqa: B008
) -> Cluster:
    cluster = Cluster(setup, num_replicas, router)
    goals = [objective(request) for request in requests]
    cluster.run(repeat(requests, goals, num_requests or len(requests)))
    return cluster


@pytest.mark.parametrize("granularity", ["tile", "chunk:512", "whole"])
@pytest.mark.parametrize(
    ("name", "output_tokens"),
    [
        ("qwentrace_like_synthetic_10min", 1),
        ("azure2023_mixed_20min", 20),
        ("mooncake_conversation_15min", 3),
    ],
)
def test_one_replica_is_the_simulator(name: str, output_tokens: int, granularity: str) -> None:
    requests = at_load(trace(name, 120, output_tokens), 0.9)
    cluster = run(requests, setup=setup(granularity))
    replay = Replay(requests, setup(granularity)).run_all()
    assert sorted(cluster.tally.ttft_s) == sorted(r.ttft_s for r in replay.records.values())
    assert cluster.replicas[0].counters == replay.counters
    assert cluster.replicas[0].scheduler.num_decisions == replay.scheduler.num_decisions
    assert cluster.tally.attainment_by_class == pytest.approx(replay.attainment_by_class)
    assert cluster.now_s == replay.now_s


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_replicas", [2, 7])
def test_everybody_ends_and_nothing_is_kept(router: str, num_replicas: int) -> None:
    requests = at_load(trace("azure2023_mixed_20min", 300, 5), 0.9 * num_replicas)
    cluster = run(requests, num_replicas, router)
    assert cluster.tally.num_ended == len(requests) == len(cluster.tally.ttft_s)
    assert min(cluster.tally.ttft_s) > 0
    assert cluster.tally.num_prompt_tokens == sum(r.input_tokens for r in requests)
    assert not any(replica.records for replica in cluster.replicas)
    assert not cluster._class_of
    for replica in cluster.replicas:
        replica.scheduler.check_integrity()
        assert replica.scheduler.num_waiting == replica.scheduler.num_prefilling == 0
        assert 0 < replica.counters.busy_s <= replica.now_s + 1e-6


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_seed_gives_the_same_run(router: str) -> None:
    requests = at_load(QWEN[:400], 0.8 * 20)
    first, second = run(requests, 20, router), run(requests, 20, router)
    assert first.tally.ttft_s == second.tally.ttft_s


def test_rejected_requests_end_too() -> None:
    times = DeviceTimes(tuple(TRUTH.items()), (1e-3, 0.5e-3), NUM_LAYERS, LIMITS)
    options = SchedulerOptions(reject_infeasible=True)
    platform = ProfiledPlatform("this CPU", "tiny", times, 16, 5000, 8192, options)
    requests = at_load([replace(r, input_tokens=500) for r in QWEN[:200]], 6.0, platform)
    rejecting = Setup("s-edf", Granularity("tile"), 0.0, 0, platform)
    cluster = Cluster(rejecting, 2, "least-load")
    cluster.run(repeat(requests, [Objective("text", 1.0, 1.0)] * 200, 200))
    num_rejected = sum(ttft_s == math.inf for ttft_s in cluster.tally.ttft_s)
    assert 20 < num_rejected < 180
    assert cluster.tally.num_ended == 200
    assert cluster.tally.attainment == pytest.approx(1 - num_rejected / 200, abs=0.2)
    assert not cluster._class_of and not any(r.records for r in cluster.replicas)


def test_more_replicas_serve_the_same_requests_sooner() -> None:
    requests = at_load(QWEN[:600], 1.5)
    attainment = [run(requests, n).tally.attainment for n in (1, 2, 4)]
    assert attainment[0] < attainment[1] <= attainment[2]
    assert attainment[2] > 0.98


def test_routers_that_look_do_better_than_one_that_does_not() -> None:
    requests = at_load(QWEN[:3000], 0.9 * 8)
    late = {
        router: 1 - run(requests, 8, router, setup=setup("whole")).tally.attainment
        for router in ROUTERS
    }
    assert late["least-load"] < 0.8 * late["round-robin"]
    assert late["slack-aware"] < 0.8 * late["round-robin"]


def test_a_trace_is_repeated_at_its_own_rate() -> None:
    requests = trace("mooncake_conversation_15min", 50)
    goals = [objective(request) for request in requests]
    offered = list(repeat(requests, goals, 175))
    assert len(offered) == 175
    arrivals_s = [one.request.arrival_s for one in offered]
    assert arrivals_s == sorted(arrivals_s)
    mean_gap_s = requests[-1].arrival_s / 49
    assert arrivals_s[50] - arrivals_s[49] == pytest.approx(mean_gap_s)
    assert arrivals_s[174] - arrivals_s[124] == pytest.approx(50 * mean_gap_s)
    for index, one in enumerate(offered):
        original = requests[index % 50]
        assert one.objective == goals[index % 50]
        assert one.request.input_tokens == original.input_tokens
        assert len(one.request.prefix_hashes) == len(original.prefix_hashes)
    rounds = [
        {h for one in offered[i : i + 50] for h in one.request.prefix_hashes} for i in (0, 50, 100)
    ]
    assert rounds[0] and not (rounds[0] & rounds[1]) and not (rounds[1] & rounds[2])
    assert [one.request for one in offered[:50]] == requests


def test_twenty_thousand_requests_take_seconds() -> None:
    requests = at_load(QWEN, 0.8 * 20)
    run(requests, 20, num_requests=2000)  # prompts of all lengths have been seen
    started_s = time.process_time()
    cluster = run(requests, 20, num_requests=20_000)
    assert time.process_time() - started_s < 15
    assert cluster.tally.num_ended == 20_000
    assert cluster.tally.attainment > 0.9


def test_replicas_that_are_never_used_cost_nothing() -> None:
    requests = scale_rate(QWEN[:5], 0.01)
    cluster = run(requests, 100)
    assert sum(replica.counters.busy_s > 0 for replica in cluster.replicas) == 5
