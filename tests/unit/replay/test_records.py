"""What a replay's records say."""

from __future__ import annotations

import dataclasses
import math

import pytest

from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.records import (
    MAX_SEND_LAG_S,
    ReplayRecord,
    attainment,
    by_class,
    send_lag_p99_s,
    summarise,
)
from flowprefill.workload import Objective, TraceRequest

TEXT, FILE = Objective("text", 0.25, 0.1), Objective("file", 6.0, 0.2)


def record(
    ttft_s: float | None, goal: Objective = TEXT, lag_s: float = 0.0, error: str | None = None
) -> ReplayRecord:
    planned = PlannedRequest(0, 10.0, 100, 3, goal)
    sent_s = 10.0 + lag_s
    tokens = () if ttft_s is None else (sent_s + ttft_s, sent_s + ttft_s + 0.5)
    return ReplayRecord(planned, sent_s, tokens, error)


def test_plan_starts_at_the_first_arrival_and_keeps_gaps_and_lengths() -> None:
    requests = [
        TraceRequest(5.0, "text", 10, 3),
        TraceRequest(7.5, "file", 600, 4, (1, 2)),
        TraceRequest(7.5, "chat", 3000, 1),
    ]
    plan = plan_replay(requests)
    assert [p.due_s for p in plan] == [0.0, 2.5, 2.5]
    assert [p.req_id for p in plan] == [0, 1, 2]
    assert [(p.input_tokens, p.output_tokens) for p in plan] == [(10, 3), (600, 4), (3000, 1)]
    assert [p.objective.name for p in plan] == ["text", "file", "long"]
    assert plan[1].prefix_hashes == (1, 2)
    assert plan_replay([]) == []


def test_plan_takes_the_objectives_that_are_given() -> None:
    requests = [TraceRequest(0.0, "text", 10, 3), TraceRequest(1.0, "text", 10, 3)]
    assert [p.objective for p in plan_replay(requests, [FILE, TEXT])] == [FILE, TEXT]
    with pytest.raises(ValueError, match="shorter"):
        plan_replay(requests, [FILE])


def test_ttft_counts_from_the_sending_and_the_lag_is_apart() -> None:
    late = record(0.2, lag_s=0.1)
    assert late.send_lag_s == pytest.approx(0.1)
    assert late.ttft_s == pytest.approx(0.2)
    assert late.is_on_time
    assert late.times.tbt_s == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("one", "is_on_time"),
    [
        (record(0.2499), True),
        (record(0.26), False),
        (record(0.26, FILE), True),
        (record(None), False),
        (record(0.1, error="UNAVAILABLE: gone"), False),
    ],
)
def test_on_time_is_a_first_token_in_time_and_no_failure(
    one: ReplayRecord, is_on_time: bool
) -> None:
    assert one.is_on_time is is_on_time


def test_attainment_is_over_all_requests() -> None:
    assert attainment([record(0.1), record(0.3), record(None), record(0.2)]) == 0.5
    with pytest.raises(ValueError, match="no requests"):
        attainment([])


def test_summary_counts_classes_errors_and_goodput() -> None:
    records = [
        record(0.1),
        record(0.4),
        record(5.0, FILE),
        record(None, FILE, error="UNAVAILABLE: full: try later"),
    ]
    summary = summarise(records, duration_s=4.0)
    assert summary["num_requests"] == 4
    assert summary["attainment"] == 0.5
    assert summary["goodput"] == 0.5
    assert summary["classes"]["text"]["attainment"] == 0.5
    assert summary["classes"]["file"] == {
        "num_requests": 2,
        "attainment": 0.5,
        "ttft_s": {"p50": None, "p90": None, "p99": None, "mean": None},
    }
    assert summary["classes"]["text"]["ttft_s"]["p50"] == 0.25
    assert summary["errors"] == {"UNAVAILABLE": 1}
    assert summary["tbt_s"]["p50"] == 0.5
    assert list(by_class(records)) == ["file", "text"]


def test_servers_own_ttft_is_summed_up_beside_the_clients() -> None:
    told = dataclasses.replace(record(0.2), server_ttft_s=0.15)
    summary = summarise([told, record(0.4), record(None, error="UNAVAILABLE: gone")], 1.0)
    assert summary["server_ttft_s"]["p99"] == 0.15
    assert summary["ttft_outside_server_s"]["p50"] == 0.05
    assert "server_ttft_s" not in summarise([record(0.4)], 1.0)


def test_goodput_over_no_time_is_none() -> None:
    assert summarise([record(0.1)], duration_s=0.0)["goodput"] is None


@pytest.mark.parametrize("lag_s", [0.9 * MAX_SEND_LAG_S, 1.1 * MAX_SEND_LAG_S])
def test_a_replay_that_was_sent_late_is_void(lag_s: float) -> None:
    records = [record(0.1)] * 49 + [record(0.1, lag_s=lag_s)] * 51
    assert send_lag_p99_s(records) == pytest.approx(lag_s)
    assert summarise(records, 1.0)["void"] is (lag_s > MAX_SEND_LAG_S)


def test_never_answered_is_infinitely_late() -> None:
    assert record(None).ttft_s == math.inf
