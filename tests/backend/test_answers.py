"""Engine outputs -> what clients see."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, NoReturn

import numpy as np
import pytest

from flowprefill.config import SLOClass
from flowprefill.engine_process import EngineState
from flowprefill.request import FinishReason, PrefillTiming
from flowprefill.tokenizer import Tokenizer
from tests.backend.conftest import Harness
from tests.backend.fake_pb_utils import InferenceResponse, ResponseSender

ALL_RETURNS = {
    f"return_{name}": True
    for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens",
                 "num_output_tokens", "timing")
}  # fmt: skip
EXTRAS = {name.removeprefix("return_") for name in ALL_RETURNS}


def answer(
    harness: Harness,
    token_ids: list[int],
    inputs: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    reason: FinishReason = FinishReason.LENGTH,
) -> ResponseSender:
    """Send a request and let the engine give it these tokens, the last one with `reason`."""
    count = len(harness.engine.submitted) + 1
    sender = harness.send({"text_input": "the prompt ", **inputs}, parameters)
    req_id = harness.engine.wait_submitted(count).req_id
    for token_id in token_ids[:-1]:
        harness.engine.say(req_id, token_id)
    harness.engine.say(req_id, token_ids[-1], reason)
    sender.wait_final()
    return sender


def texts(responses: list[InferenceResponse]) -> list[str]:
    return [response.text() for response in responses]


def test_a_stream_has_one_response_per_token_and_final_on_the_last(harness: Harness) -> None:
    ids = harness.ids("then or")
    sender = answer(harness, ids, {"stream": True})
    assert texts(sender.responses) == [harness.tokenizer.token_text(i) for i in ids]


@pytest.mark.parametrize(
    ("inputs", "prefix"),
    [({}, "the prompt "), ({"exclude_input_in_output": True}, ""),
     ({"exclude_input_in_output": False}, "the prompt "), ({"stream": False}, "the prompt ")],
)  # fmt: skip
def test_without_stream_there_is_one_response_with_prompt_by_default(
    harness: Harness, inputs: dict[str, Any], prefix: str
) -> None:
    sender = answer(harness, harness.ids("then or"), inputs)
    assert texts(sender.responses) == [prefix + "then or"]


@pytest.mark.parametrize(
    ("text", "stop"),
    [("then 👩‍👩‍👧 한국어", []), ("abcDEFGHIJklm", ["DEFGHIJ"]), ("aabaabac", ["abac", "x"])],
)
def test_stream_and_single_answer_have_the_same_text(
    harness: Harness, text: str, stop: list[str]
) -> None:
    inputs = {"exclude_input_in_output": True, "sampling_parameters": json.dumps({"stop": stop})}
    ids = harness.ids(text)
    streamed = answer(harness, ids, {**inputs, "stream": True}).text
    assert streamed == answer(harness, ids, inputs).text
    assert streamed == text[: min((text.find(s) for s in stop if s in text), default=None)]
    assert "\ufffd" not in streamed


def test_a_stop_string_ends_the_answer_and_the_engine_s_work(harness: Harness) -> None:
    inputs = {"stream": True, "return_finish_reason": True, "sampling_parameters": '{"stop": "en"}'}
    sender = harness.send({"text_input": "a", **inputs})
    req_id = harness.engine.wait_submitted().req_id
    for token_id in harness.ids("then and more"):
        harness.engine.say(req_id, token_id)
    assert sender.text == "th"
    assert sender.responses[-1].text("finish_reason") == "stop"
    harness.engine.wait_cancelled(req_id)


def test_the_token_that_stops_is_counted_but_is_no_text(harness: Harness) -> None:
    inputs = {"stream": True, "return_num_output_tokens": True}
    sender = answer(harness, harness.ids("th!"), inputs, reason=FinishReason.STOP)
    assert sender.text == "th"
    assert [int(r.outputs["num_output_tokens"][0]) for r in sender.responses] == [1, 1, 1]


def test_extra_outputs_come_with_every_response_that_asked_and_no_other(harness: Harness) -> None:
    ids = harness.ids("the")
    responses = answer(harness, ids * 3, {"stream": True, **ALL_RETURNS}).responses
    for response in responses[:-1]:
        assert set(response.outputs) == {"text_output", *EXTRAS} - {"timing"}
    assert set(responses[-1].outputs) == {"text_output", *EXTRAS}
    for name in EXTRAS:
        (response,) = answer(harness, ids, {f"return_{name}": True}).responses
        assert set(response.outputs) == {"text_output", name}
    (response,) = answer(harness, ids, {}).responses
    assert set(response.outputs) == {"text_output"}


def test_extra_outputs_of_a_stream(harness: Harness) -> None:
    ids = harness.ids("abc")
    inputs = {"stream": True, **ALL_RETURNS, "sampling_parameters": '{"logprobs": 1}'}
    responses = answer(harness, ids, inputs, reason=FinishReason.LENGTH).responses
    num_prompt_tokens = len(harness.tokenizer.encode("the prompt "))
    assert [r.text("finish_reason") for r in responses] == ["None", "None", "length"]
    assert [r.outputs["cumulative_logprob"].tolist() for r in responses] == [[-0.5], [-1], [-1.5]]
    assert [int(r.outputs["num_output_tokens"][0]) for r in responses] == [1, 1, 1]
    assert {int(r.outputs["num_input_tokens"][0]) for r in responses} == {num_prompt_tokens}
    assert json.loads(responses[0].text("logprobs")) == [
        {
            str(ids[0]): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            str(ids[0] + 1): {"logprob": -9999.0, "rank": 2, "decoded_token": "b"},
        }
    ]
    dtypes = {name: value.dtype for name, value in responses[0].outputs.items()}
    assert dtypes["cumulative_logprob"] == np.float32
    assert dtypes["num_input_tokens"] == dtypes["num_output_tokens"] == np.uint32


def test_extra_outputs_of_a_single_answer_are_the_sums(harness: Harness) -> None:
    inputs = {**ALL_RETURNS, "sampling_parameters": '{"logprobs": 1}'}
    (response,) = answer(harness, harness.ids("abc"), inputs).responses
    assert int(response.outputs["num_output_tokens"][0]) == 3
    assert response.outputs["cumulative_logprob"].tolist() == [-1.5]
    assert len(json.loads(response.text("logprobs"))) == 3
    assert response.text("finish_reason") == "length"


PREFILL = PrefillTiming(0.0, 0.25, predicted_s=0.2, num_cached_tokens=64, blocking_s=0.003)


@pytest.mark.parametrize("others", [{}, ALL_RETURNS])
@pytest.mark.parametrize("stream", [True, False])
def test_timing_is_that_of_the_engine_and_of_the_way_out(
    tokenizer: Tokenizer, stream: bool, others: dict[str, bool]
) -> None:
    harness = Harness(tokenizer, slo_classes=(SLOClass("chat", ttft_slo_ms=60_000),))
    begin_s = time.monotonic()
    inputs = {"stream": stream, "return_timing": True, **others}
    sender = harness.send({"text_input": "the prompt ", **inputs}, {"slo_class": "chat"})
    request = harness.engine.wait_submitted()
    prefill = dataclasses.replace(PREFILL, started_s=request.arrival_s + 0.5)
    first, second = harness.ids("ab")
    harness.engine.say(request.req_id, first, prefill=prefill)
    harness.engine.say(request.req_id, second, FinishReason.LENGTH, num_preemptions=3)
    timing = json.loads(sender.wait_final()[-1].text("timing"))
    harness.instance.close()
    assert 0 < timing.pop("ttft_s") <= timing.pop("e2e_s") < time.monotonic() - begin_s
    assert timing == {
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "blocking_s": 0.003,
        "num_preemptions": 3,
        "num_cached_tokens": 64,
        "num_output_tokens": 2,
        "slo_class": "chat",
        "ttft_slo_ms": 60_000,
        "is_on_time": True,
    }


def test_timing_may_be_asked_for_by_a_parameter_and_says_when_the_objective_was_missed(
    harness: Harness,
) -> None:
    parameters = {"return_timing": True, "ttft_slo_ms": 1e-3}
    (response,) = answer(harness, harness.ids("a"), {}, parameters).responses
    timing = json.loads(response.text("timing"))
    assert (timing["is_on_time"], timing["ttft_slo_ms"]) == (False, 0.001)
    assert (timing["slo_class"], timing["queue_s"]) == (None, None)
    for inputs, others in (({}, {}), ({"return_timing": False}, parameters)):
        (response,) = answer(harness, harness.ids("a"), inputs, others).responses
        assert set(response.outputs) == {"text_output"}


def test_logprobs_are_null_when_the_sampling_parameters_ask_for_none(harness: Harness) -> None:
    (response,) = answer(harness, harness.ids("a"), {"return_logprobs": True}).responses
    assert response.text("logprobs") == "null"


def test_an_engine_that_dies_fails_its_requests_as_unavailable(harness: Harness) -> None:
    sender = harness.send({"text_input": "a", "stream": True})
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, harness.ids("a")[0])
    harness.engine.end(req_id, FinishReason.ERROR, "UNAVAILABLE", "engine process 7 was killed")
    error = sender.error
    assert error is not None and error.code == "UNAVAILABLE"
    assert error.message == "Error generating stream: engine process 7 was killed"
    assert [r.error for r in sender.responses[:-1]] == [None]


def test_outputs_after_the_end_and_of_strangers_are_dropped(harness: Harness) -> None:
    sender = answer(harness, harness.ids("a"), {"stream": True})
    (req_id,) = harness.engine.submitted
    harness.engine.say(req_id, 5)
    harness.engine.end(req_id, FinishReason.CANCELLED)
    harness.engine.say(999, 5)
    assert answer(harness, harness.ids("b"), {"stream": True}).text == "b"
    assert len(sender.wait_final()) == 1


def test_a_send_that_fails_ends_its_own_request_only(harness: Harness) -> None:
    broken = ResponseSender(fails_at=1)
    harness.send({"text_input": "a", "stream": True}, sender=broken)
    req_id = harness.engine.wait_submitted().req_id
    for token_id in harness.ids("abc"):
        harness.engine.say(req_id, token_id)
    assert broken.error is not None and broken.error.code == "INTERNAL"
    harness.engine.wait_cancelled(req_id)
    assert answer(harness, harness.ids("b"), {"stream": True}).text == "b"


def test_an_unhealthy_engine_refuses_only_where_the_model_asks_for_the_check(
    harness: Harness,
) -> None:
    unloads: list[str] = []
    strict = Harness(harness.tokenizer, unload=lambda: unloads.append("model"))
    strict.engine.state = harness.engine.state = EngineState.RESTARTING
    error = strict.send({"text_input": "a"}).error
    strict.instance.close()
    assert error is not None and error.code == "UNAVAILABLE"
    assert unloads == []
    harness.send({"text_input": "a"})
    harness.engine.wait_submitted()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_an_engine_that_failed_for_good_unloads_the_model_once(
    tokenizer: Tokenizer, is_allowed: bool
) -> None:
    unloads: list[str] = []

    def unload() -> None:
        unloads.append("model")
        if not is_allowed:
            raise RuntimeError("explicit model load / unload is not allowed")

    harness = Harness(tokenizer, unload)
    harness.engine.state = EngineState.FAILED
    errors = [harness.send({"text_input": "a"}).error for _ in range(2)]
    harness.instance.close()
    assert [error and error.code for error in errors] == ["UNAVAILABLE"] * 2
    assert unloads == ["model"]
    line = "[flowprefill] Engine is not healthy and model will be unloaded"
    assert harness.log.lines.count(line) == 1
    refusals = [line for line in harness.log.lines if "is not allowed" in line]
    assert len(refusals) == (0 if is_allowed else 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_last_send_that_fails_is_tried_once_more_without_the_response(
    harness: Harness, stream: bool
) -> None:
    broken = ResponseSender(fails_at=0)
    harness.send({"text_input": "a", "stream": stream}, sender=broken)
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, 5, FinishReason.LENGTH)
    assert broken.wait_final() == []
    assert harness.instance._live.all() == []
    assert answer(harness, harness.ids("b"), {"stream": True}).text == "b"


def test_the_engine_s_work_ends_even_if_its_client_cannot_be_told(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("broken")

    broken = ResponseSender(fails_at=0)
    harness.send({"text_input": "a", "stream": True}, sender=broken)
    req_id = harness.engine.wait_submitted().req_id
    monkeypatch.setattr(broken, "send", fail)
    harness.engine.say(req_id, 5)
    harness.engine.wait_cancelled(req_id)


def test_closing_fails_what_is_live_as_unavailable_and_closes_the_engine(harness: Harness) -> None:
    live = [harness.send({"text_input": "a", "stream": stream}) for stream in (True, False)]
    harness.engine.wait_submitted(2)
    harness.instance.close()
    assert [sender.error and sender.error.code for sender in live] == ["UNAVAILABLE"] * 2
    assert harness.engine.is_closed


def test_loading_reports_its_progress_in_tenths(harness: Harness) -> None:
    lines = [line for line in harness.log.lines if "weights" in line]
    assert len(lines) == 11 and lines[-1].endswith("weights 100%")
