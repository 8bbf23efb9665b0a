"""Timelines: a control request that is answered part by part, and what its parts say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill.engine_process import EngineState
from flowprefill.request import FinishReason
from flowprefill.timeline import RequestSpan, Timeline, gather
from tests.backend.conftest import Harness
from tests.backend.fake_pb_utils import ResponseSender

LONG_S = 50.0
"""Longer than any test: such a recording is ended."""


@pytest.fixture(autouse=True)
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowprefill_backend.timeline.PART_S", 0.01)


@pytest.fixture
def recording(harness: Harness) -> Iterator[ResponseSender]:
    """One that has begun."""
    sender = begin(harness)
    yield sender
    end(harness)


def begin(harness: Harness, seconds: float = LONG_S) -> ResponseSender:
    sender = harness.send({"text_input": ""}, {"record_timeline": seconds})
    sender.wait_responses(1)
    return sender


def end(harness: Harness) -> str:
    return harness.send({"text_input": ""}, {"record_timeline": 0}).text


def parts_of(sender: ResponseSender) -> list[dict[str, Any]]:
    return [json.loads(response.text()) for response in sender.wait_final()]


def recorded(sender: ResponseSender) -> Timeline:
    return gather(parts_of(sender))


def test_a_recording_is_as_long_as_asked_for_and_its_parts_touch(harness: Harness) -> None:
    sender = begin(harness, 0.05)
    parts = parts_of(sender)
    assert [part["end"] for part in parts] == [*[""] * (len(parts) - 1), "time"]
    assert all(a["to_s"] == b["from_s"] for a, b in itertools.pairwise(parts))
    timeline = recorded(sender)
    assert timeline.to_s - timeline.from_s >= 0.05
    assert timeline.facts == {
        "architecture": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "policy": "goodput",
        "granularity": "tile",
    }
    assert not harness.engine.is_recording


def test_runs_are_passed_on_as_they_come(harness: Harness, recording: ResponseSender) -> None:
    assert harness.engine.is_recording
    run = [None, [7], 1.0, 2.0, True, []]
    harness.engine.recorded = [run]
    assert end(harness) == "ended"
    assert [run for part in parts_of(recording) for run in part["runs"]] == [run]


def test_requests_have_their_client_s_id_their_times_and_their_end(
    harness: Harness, recording: ResponseSender
) -> None:
    sender = harness.send({"text_input": "then"}, {"ttft_slo_ms": 5000}, request_id="mine")
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, 5)
    harness.engine.say(req_id, 6, FinishReason.LENGTH)
    sender.wait_final()
    end(harness)
    (span,) = recorded(recording).spans
    assert (span.req_id, span.client_id, span.outcome) == (req_id, "mine", "finished")
    assert span.num_tokens == len(harness.tokenizer.encode("then"))
    assert span.num_output_tokens == 2
    assert span.deadline_s - span.arrival_s == pytest.approx(5)
    assert span.arrival_s < span.first_token_s < span.end_s < span.deadline_s
    assert span.is_on_time


def test_requests_that_still_run_and_those_that_fail_are_there(harness: Harness) -> None:
    before = harness.send({"text_input": "a", "stream": True}, request_id="before")
    sender = begin(harness)
    failed = harness.send({"text_input": "a"}, request_id="failed")
    harness.engine.end(harness.engine.wait_submitted(2).req_id, FinishReason.ERROR, "UNAVAILABLE")
    failed.wait_final()
    end(harness)
    spans = {span.client_id: span for span in recorded(sender).spans}
    assert {name: span.outcome for name, span in spans.items()} == {
        "before": "",
        "failed": "UNAVAILABLE",
    }
    assert spans["before"].end_s == spans["before"].first_token_s == float("inf")
    assert not before.is_final


def test_only_one_is_recorded_at_a_time(harness: Harness, recording: ResponseSender) -> None:
    error = harness.send({"text_input": ""}, {"record_timeline": 1}).error
    assert error is not None and error.code == "UNAVAILABLE" and "one at a time" in error.message
    assert end(harness) == "ended"
    recording.wait_final()
    assert end(harness) == "not found"
    assert recorded(begin(harness, 0.02)).end == "time"


def test_a_recording_ends_when_its_client_leaves(
    harness: Harness, recording: ResponseSender
) -> None:
    recording.leave()
    assert recorded(recording).end == "asked"
    assert not harness.engine.is_recording


def test_a_recording_ends_with_too_much_to_tell(
    harness: Harness, recording: ResponseSender
) -> None:
    harness.engine.is_full = True
    assert recorded(recording).end == "full"
    assert not harness.engine.is_recording


def test_a_recording_ends_with_too_many_requests(
    harness: Harness, recording: ResponseSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowprefill_backend.timeline.MAX_ENDED", 2)
    for _ in range(2):
        harness.send({"text_input": "a"})
    harness.engine.wait_submitted(2)
    for req_id in harness.engine.submitted:
        harness.engine.end(req_id, FinishReason.ERROR, "UNAVAILABLE")
    assert recorded(recording).end == "full"


def test_a_recording_ends_when_the_server_stops(harness: Harness) -> None:
    sender = begin(harness)
    harness.instance.refuse_new()
    assert recorded(sender).end == "stopping"
    error = harness.send({"text_input": ""}, {"record_timeline": 1}).error
    assert error is not None and error.code == "UNAVAILABLE"


def test_a_recording_fails_with_its_engine(harness: Harness, recording: ResponseSender) -> None:
    harness.engine.state = EngineState.RESTARTING
    assert recording.error is not None and recording.error.code == "UNAVAILABLE"
    harness.engine.state = EngineState.READY
    assert recorded(begin(harness, 0.02)).end == "time"


@pytest.mark.parametrize("seconds", [-1, 60.5, True, "5", [1]])
def test_other_lengths_are_refused(harness: Harness, seconds: object) -> None:
    error = harness.send({"text_input": ""}, {"record_timeline": seconds}).error
    assert error is not None and error.code == "INVALID_ARG"
    assert "record_timeline" in error.message and "60" in error.message
    assert not harness.engine.is_recording


def test_a_span_is_what_the_wire_takes(harness: Harness, recording: ResponseSender) -> None:
    harness.send({"text_input": "a", "stream": True}, request_id='<b>"\u00e9')
    harness.engine.wait_submitted()
    end(harness)
    (wire,) = {tuple(wire) for part in parts_of(recording) for wire in part["requests"]}
    assert RequestSpan.from_wire(list(wire)).client_id == '<b>"\u00e9'
