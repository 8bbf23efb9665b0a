"""RecordedReplay: its timeline says what the replay did, and changes nothing of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flowprefill.bench.plots.chrome_trace import chrome_trace
from flowprefill.granularity import Granularity
from flowprefill.simulator.recorder import RecordedReplay
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.timeline import preempted
from flowprefill.workload import TraceRequest, clip_lengths, read_trace, window
from tests.unit.plots.test_chrome_trace import check_device_does_one_thing, check_valid

TRACES = Path(__file__).parents[3] / "clients" / "traces"
GROUPS = {
    "whole": {"pass"},
    "chunk:512": {"chunk", "pass"},  # packed prompts are one pass
    "layer": {"layer"},
    "op": {"qkv", "attention", "o_proj", "gate_up", "down", "head"},
    "tile": {"qkv", "attention", "o_proj", "gate_up", "down", "head"},
}


def loaded(num_output_tokens: int = 1, num_requests: int = 60) -> list[TraceRequest]:
    trace = read_trace(TRACES / "qwentrace_like_synthetic_10min.csv")
    return at_load(clip_lengths(window(trace, 0, num_requests), 10**6, num_output_tokens), 1.2)


def record(requests: list[TraceRequest], kind: str, policy: str = "s-edf") -> RecordedReplay:
    replay = RecordedReplay(requests, Setup(policy, Granularity.parse(kind)))
    replay.run_all()
    return replay


def test_recording_changes_nothing() -> None:
    requests = loaded()
    plain = Replay(requests, Setup("s-edf", Granularity("op"))).run_all()
    recorded = record(requests, "op")
    assert [r.first_token_s for r in recorded.records.values()] == [
        r.first_token_s for r in plain.records.values()
    ]


@pytest.mark.parametrize("kind", GROUPS)
def test_runs_are_what_the_device_did(kind: str) -> None:
    replay = record(loaded(), kind)
    busy_s = sum(run.end_s - run.start_s for run in replay.runs)
    assert busy_s == pytest.approx(replay.counters.busy_s)
    for run, following in itertools.pairwise(replay.runs):
        assert run.end_s <= following.start_s
    assert len(preempted(replay.runs)) == replay.scheduler.num_preemptions()
    # Each request's last run ends with its first token.
    ends = {req_id: run.end_s for run in replay.runs for req_id in run.req_ids if run.is_done}
    assert ends == {i: record.first_token_s for i, record in replay.records.items()}


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_fill_their_runs(kind: str) -> None:
    replay = record(loaded(), kind)
    assert {group.name for run in replay.runs for group in run.slices} == GROUPS[kind]
    for run in replay.runs:
        edges = [run.start_s, *(group.end_s for group in run.slices)]
        starts = [*(group.start_s for group in run.slices), run.end_s]
        assert starts == pytest.approx(edges, abs=1e-8)


def test_spans_say_what_came_of_the_requests() -> None:
    replay = record(loaded(), "tile")
    spans = replay.request_spans()
    assert sum(span.is_on_time for span in spans) == round(replay.attainment * 60)
    assert sorted(span.req_id for span in spans) == list(range(60))
    assert {span.slo_class for span in spans} == set(replay.num_by_class)


def test_a_recorded_replay_makes_a_valid_trace() -> None:
    replay = record(loaded(num_output_tokens=8, num_requests=200), "tile")
    assert any(run.task_id is None for run in replay.runs)
    assert replay.scheduler.num_preemptions() > 0
    tracks = check_valid(chrome_trace(replay.runs, replay.request_spans(), {}))
    check_device_does_one_thing(tracks)
    assert len(tracks) == 201
