"""Replays of traces: who is counted as on time, and what the searches over loads find."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flowprefill.granularity import Granularity
from flowprefill.simulator import measures
from flowprefill.simulator.measures import LOADS, SLO_SCALES, bisect_last, measure
from flowprefill.simulator.platform import PAPER_PLATFORM
from flowprefill.simulator.replay import (
    Replay,
    Setup,
    Target,
    at_load,
    offered_load,
    rate_at_load_1,
)
from flowprefill.workload import (
    TraceError,
    TraceRequest,
    clip_lengths,
    objective,
    read_trace,
    window,
)

TRACES = Path(__file__).parents[3] / "clients" / "traces"


def trace(name: str, num_requests: int, start: int = 0) -> list[TraceRequest]:
    """Prefills only."""
    requests = window(read_trace(TRACES / f"{name}.csv"), start, num_requests)
    return clip_lengths(requests, 1_000_000, 1)


MAX_SLICE_S = 0.004
"""What tiles of the modelled device aim at (roofline.py)."""
QWEN = trace("qwentrace_like_synthetic_10min", 300)


def setup(policy: str = "s-edf", granularity: str = "op", **options: float) -> Setup:
    return Setup(policy, Granularity.parse(granularity), **options)  # type: ignore[arg-type]


def on_time(replay: Replay, requests: list[TraceRequest]) -> dict[str, list[bool]]:
    """By class, from the records."""
    found: dict[str, list[bool]] = {}
    for record, request in zip(replay.records.values(), requests, strict=True):
        goal = objective(request)
        found.setdefault(goal.name, []).append(record.ttft_s <= goal.ttft_s)
    return found


def test_load_one_keeps_the_device_just_busy() -> None:
    requests = at_load(QWEN, 1.0)
    assert offered_load(requests) == pytest.approx(1.0)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    assert rate_at_load_1(requests) == pytest.approx(len(requests) / span_s)
    replay = Replay(requests, setup("fcfs", "whole")).run_all()
    assert replay.counters.busy_s == pytest.approx(span_s, rel=0.03)


def test_requests_without_a_rate_are_refused() -> None:
    with pytest.raises(TraceError, match="arrive at once"):
        offered_load([TraceRequest(0.0, "conv", 5, 1)] * 3)


@pytest.mark.parametrize("load", [0.3, 1.2, 4.0])
def test_attainment_is_what_the_records_say(load: float) -> None:
    requests = at_load(QWEN, load)
    replay = Replay(requests, setup()).run_all()
    by_class = on_time(replay, requests)
    everybody = [met for group in by_class.values() for met in group]
    assert replay.attainment == pytest.approx(sum(everybody) / len(everybody))
    assert replay.attainment_by_class == {
        name: pytest.approx(sum(met) / len(met)) for name, met in sorted(by_class.items())
    }
    assert sum(replay.num_by_class.values()) == len(QWEN)


@pytest.mark.parametrize("every_class", [False, True])
def test_stopping_early_changes_no_answer(every_class: bool) -> None:
    target = Target(0.9, every_class)
    num_stopped = 0
    for load in (0.2, 0.6, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 2.0, 5.0):
        requests = at_load(QWEN, load)
        full = Replay(requests, setup()).run_all()
        early = Replay(requests, setup(), target=target).run_all()
        assert early.reaches(target) == full.reaches(target)
        assert early.is_stopped == (not full.reaches(target))
        num_stopped += early.is_stopped
    assert 0 < num_stopped < 10


def test_doubled_objectives_are_met_at_a_higher_load() -> None:
    requests = at_load(QWEN, 1.6)
    assert (
        Replay(requests, setup(), slo_scale=2.0).run_all().attainment
        > Replay(requests, setup()).run_all().attainment
    )


def test_shared_prefixes_of_a_trace_are_reused() -> None:
    requests = trace("mooncake_conversation_15min", 100)
    replay = Replay(at_load(requests, 0.5), setup()).run_all()
    num_cached = sum(record.num_cached_tokens for record in replay.records.values())
    assert num_cached > 512 * 50
    without = [dataclasses.replace(r, prefix_hashes=()) for r in requests]
    assert replay.counters.busy_s < Replay(at_load(without, 0.5), setup()).run_all().counters.busy_s


def test_replays_with_output_tokens_keep_token_gaps() -> None:
    requests = clip_lengths(
        window(read_trace(TRACES / "azure2023_mixed_20min.csv"), 0, 60), 10**6, 30
    )
    replay = Replay(at_load(requests, 0.5), setup()).run_all()
    assert replay.counters.decode_steps > 0
    for record, request in zip(replay.records.values(), requests, strict=True):
        assert record.num_tokens == request.output_tokens
        assert record.max_gap_s <= record.arrival.tbt_slo_s + 0.02


@pytest.mark.parametrize("answer", range(-1, 9))
def test_bisection_finds_the_last_that_holds(answer: int) -> None:
    asked: list[int] = []

    def holds(index: int) -> bool:
        asked.append(index)
        return index <= answer

    assert bisect_last(holds, 9) == answer
    assert len(asked) <= 4
    assert len(set(asked)) == len(asked)


def test_measures_lie_on_the_edge_of_what_is_reached() -> None:
    found = measure(QWEN, setup(), load=0.7)

    def reaches(load: float, slo_scale: float = 1.0) -> bool:
        return Replay(at_load(QWEN, load), setup(), slo_scale).run_all().reaches(Target())

    index = LOADS.index(found.max_load_90)
    assert [reaches(LOADS[i]) for i in (index, index + 1)] == [True, False]
    assert 0 < found.max_load_90_every_class <= found.max_load_90
    index = SLO_SCALES.index(found.min_slo_scale_90)
    assert [reaches(0.7, SLO_SCALES[i]) for i in (index - 1, index)] == [False, True]
    fixed = at_load(QWEN, 0.7)
    full = Replay(fixed, setup()).run_all()
    assert found.mean_ttft_s == full.mean_ttft_s
    assert found.attainment == full.attainment_by_class


def test_preemption_by_operators_carries_more_load_than_whole_prefills_and_chunks() -> None:
    loads = {
        granularity: measures.max_loads(QWEN, setup("s-edf", granularity))[0]
        for granularity in ("whole", "chunk:512", "op")
    }
    assert loads["op"] > 1.02 * loads["chunk:512"] > 1.02 * 2 * loads["whole"]


def test_first_come_first_served_gains_nothing_from_finer_boundaries() -> None:
    whole, op = (measure(QWEN, setup("fcfs", kind), load=0.5) for kind in ("whole", "op"))
    assert op.max_load_90 == whole.max_load_90
    assert op.mean_ttft_s == pytest.approx(whole.mean_ttft_s)


def test_newcomers_that_preempt_wait_for_one_boundary() -> None:
    """Layers block longer than operators, operators longer than tiles; each has its longest."""
    requests = at_load(QWEN, 0.9)
    longest_s = {}
    for granularity in ("layer", "op", "tile"):
        replay = Replay(requests, setup("s-edf", granularity)).run_all()
        assert 0 < len(replay.blocking_s) <= replay.scheduler.num_preemptions()
        assert min(replay.blocking_s) >= 0
        longest_s[granularity] = max(replay.blocking_s)
    assert longest_s["tile"] < longest_s["op"] < longest_s["layer"]
    assert longest_s["tile"] <= 2 * MAX_SLICE_S


def test_nobody_is_blocked_where_nothing_is_interrupted() -> None:
    replay = Replay(at_load(QWEN, 0.9), setup("s-edf", "whole")).run_all()
    assert replay.blocking_s == []


def test_no_policy_takes_a_higher_load_than_the_bound_leaves() -> None:
    bound = measures.max_load_of_any_schedule(QWEN, PAPER_PLATFORM)
    assert bound is not None
    best, _ = measures.max_loads(QWEN, setup("goodput", "tile"))
    assert 0.5 * bound < best <= bound


def test_the_share_of_the_bound_counts_requests_on_time() -> None:
    requests = at_load(QWEN, 1.5)
    replay = Replay(requests, setup("goodput", "tile")).run_all()
    met = sum(sum(group) for group in on_time(replay, requests).values())
    bound = measures.bound_of(replay, PAPER_PLATFORM)
    assert bound is not None and met < bound < 300
    assert measures.bound_fraction(replay, bound) == met / bound
    assert measures.bound_fraction(replay, None) is None
