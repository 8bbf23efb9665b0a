"""What execute() is given -> what the engine gets, or an error naming field, value and limit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from flowprefill.config import SLOClass
from flowprefill.errors import FlowPrefillError, QueueFullError
from flowprefill.request import SLO
from flowprefill.tokenizer import Tokenizer
from tests.backend.conftest import Harness, hold
from tests.backend.fake_pb_utils import InferenceRequest


@pytest.mark.parametrize(
    ("inputs", "parameters", "ttft_s", "tbt_s"),
    [
        ({}, {}, 0.7, 0.07),
        ({}, {"ttft_slo_ms": 300, "tbt_slo_ms": "30.5"}, 0.3, 0.0305),
        ({"sampling_parameters": '{"ttft_slo_ms": "200"}'}, {"ttft_slo_ms": 300}, 0.2, 0.07),
        ({"sampling_parameters": "{}"}, {"ttft_slo_ms": 300}, 0.3, 0.07),
        ({"sampling_parameters": '{"ttft_slo_ms": null}'}, {}, 0.7, 0.07),
        (
            {"ttft_slo_ms": 100.0, "tbt_slo_ms": 10.0, "sampling_parameters": '{"ttft_slo_ms": 1}'},
            {"ttft_slo_ms": 2, "tbt_slo_ms": 3},
            0.1,
            0.01,
        ),
    ],
)
def test_an_objective_is_taken_from_tensor_then_sampling_key_then_parameter_then_model(
    harness: Harness,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    ttft_s: float,
    tbt_s: float,
) -> None:
    harness.send({"text_input": "the", **inputs}, parameters)
    slo = harness.engine.wait_submitted().slo
    assert (slo.ttft_s, slo.tbt_s) == pytest.approx((ttft_s, tbt_s))


CLASSES = (SLOClass("chat", 250, 50, rank=3, weight=2.0), SLOClass("batch", rank=-1))


@pytest.fixture
def with_classes(tokenizer: Tokenizer) -> Iterator[Harness]:
    harness = Harness(tokenizer, slo_classes=CLASSES)
    yield harness
    harness.instance.close()


@pytest.mark.parametrize(
    ("inputs", "parameters", "slo"),
    [
        ({}, {}, SLO(0.7, 0.07)),
        ({}, {"slo_class": "chat"}, SLO(0.25, 0.05, "chat", 3, 2.0)),
        ({}, {"slo_class": "batch"}, SLO(0.7, 0.07, "batch", -1, 1.0)),
        ({}, {"slo_class": "chat", "ttft_slo_ms": 100}, SLO(0.1, 0.05, "chat", 3, 2.0)),
        ({"tbt_slo_ms": 20.0}, {"slo_class": "chat"}, SLO(0.25, 0.02, "chat", 3, 2.0)),
        (
            {"sampling_parameters": '{"slo_class": "batch"}'},
            {"slo_class": "chat"},
            SLO(0.7, 0.07, "batch", -1, 1.0),
        ),
        (
            {"sampling_parameters": '{"slo_class": null}'},
            {"slo_class": "chat"},
            SLO(0.25, 0.05, "chat", 3, 2.0),
        ),
    ],
)
def test_a_class_brings_what_the_request_does_not(
    with_classes: Harness, inputs: dict[str, Any], parameters: dict[str, Any], slo: SLO
) -> None:
    with_classes.send({"text_input": "the", **inputs}, parameters)
    assert with_classes.engine.wait_submitted().slo == slo


def test_an_unknown_class_is_refused_with_the_known_ones(with_classes: Harness) -> None:
    error = with_classes.send({"text_input": "the"}, {"slo_class": "vip"}).error
    assert error is not None and error.code == "INVALID_ARG"
    assert error.message.endswith(": slo_class='vip': must be one of 'chat', 'batch'")


@pytest.mark.parametrize(
    ("inputs", "parameters", "tenant"),
    [
        ({}, {}, ""),
        ({}, {"tenant": "blue"}, "blue"),
        ({"sampling_parameters": '{"tenant": "red"}'}, {"tenant": "blue"}, "red"),
        ({"sampling_parameters": "{}"}, {"tenant": "é" * 256}, "é" * 256),
    ],
)
def test_the_tenant_is_taken_from_sampling_key_then_parameter(
    harness: Harness, inputs: dict[str, Any], parameters: dict[str, Any], tenant: str
) -> None:
    harness.send({"text_input": "the", **inputs}, parameters)
    assert harness.engine.wait_submitted().tenant == tenant


def test_sampling_parameters_hide_the_request_s_parameters(harness: Harness) -> None:
    inputs = {"text_input": "the", "sampling_parameters": '{"max_tokens": "7"}'}
    harness.send(inputs, {"temperature": 0.5, "max_tokens": 9})
    sampling = harness.engine.wait_submitted().sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 1.0)


def test_without_the_tensor_parameters_are_sampling_parameters_and_strange_ones_are_ignored(
    harness: Harness,
) -> None:
    parameters = {"max_tokens": 3, "ignore_eos": "false", "temperature": "0.1", "traceparent": "x"}
    harness.send({"text_input": "the"}, parameters)
    sampling = harness.engine.wait_submitted().sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, False, 0.1)


def test_the_prompt_and_the_time_of_arrival_reach_the_engine(harness: Harness) -> None:
    text = "then \0 the rest, ünïcödé"
    harness.send({"text_input": text})
    request = harness.engine.wait_submitted()
    assert request.prompt_token_ids == harness.tokenizer.encode(text)
    assert request.deadline_s == pytest.approx(request.arrival_s + 0.7)


NOT_UTF8 = b"ok \xff"
HUGE = b"{}" + b" " * 2**20
TOO_BIG = ("sampling_parameters", "at most 1048576 bytes")
BAD_REQUESTS: list[tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...]]] = [
    ({"text_input": ""}, {}, "INVALID_ARG", ("text_input", "''")),
    ({"text_input": NOT_UTF8}, {}, "INVALID_ARG", ("text_input", "UTF-8", "byte 3")),
    ({}, {}, "INVALID_ARG", ("text_input",)),
    ({"text_input": np.array([b"a", b"b"], dtype=object)}, {}, "INVALID_ARG", ("text_input",)),
    ({"text_input": "x" * 10_000}, {}, "INVALID_ARG", ("text_input", "10000 bytes", "100")),
    ({"text_input": "the"}, {"max_tokens": 100}, "INVALID_ARG", (" tokens", "=100", "len 100")),
    ({"text_input": "the", "sampling_parameters": "{"}, {}, "INVALID_ARG", ("sampling_param",)),
    ({"text_input": "the", "sampling_parameters": "[1]"}, {}, "INVALID_ARG", ("sampling_param",)),
    ({"text_input": "the", "sampling_parameters": NOT_UTF8}, {}, "INVALID_ARG", ("UTF-8",)),
    ({"text_input": "the", "sampling_parameters": "[" * 9999}, {}, "INVALID_ARG", ("sampling_",)),
    ({"text_input": "a", "sampling_parameters": '{"tempo": 1}'}, {}, "INVALID_ARG", ("tempo",)),
    ({"text_input": "a", "sampling_parameters": '{"top_p": NaN}'}, {}, "INVALID_ARG", ("top_p",)),
    ({"text_input": "a"}, {"temperature": -1}, "INVALID_ARG", ("temperature=-1", "[0, 100]")),
    ({"text_input": "a"}, {"ttft_slo_ms": True}, "INVALID_ARG", ("ttft_slo_ms=True",)),
    ({"text_input": "a"}, {"ttft_slo_ms": "soon"}, "INVALID_ARG", ("ttft_slo_ms='soon'",)),
    ({"text_input": "a"}, {"tbt_slo_ms": 10**400}, "INVALID_ARG", ("tbt_slo_ms=1000",)),
    *(
        ({"text_input": "a", **inputs}, parameters, "INVALID_ARG", (f"{name}=", "> 0 and <= 864"))
        for name in ("ttft_slo_ms", "tbt_slo_ms")
        for slo in (0.0, -1.0, float("nan"), float("inf"), 1e12)
        for inputs, parameters in (
            ({name: slo}, {}),
            ({"sampling_parameters": json.dumps({name: slo})}, {}),
            ({}, {name: str(slo)}),
        )
    ),
    ({"text_input": "a"}, {"slo_class": "vip"}, "INVALID_ARG", ("slo_class='vip'", "no slo_clas")),
    ({"text_input": "a"}, {"slo_class": ""}, "INVALID_ARG", ("slo_class=''", "no slo_classes")),
    ({"text_input": "a"}, {"slo_class": 5}, "INVALID_ARG", ("slo_class=5", "256 characters")),
    ({"text_input": "a"}, {"tenant": ["b"]}, "INVALID_ARG", ("tenant=['b']", "256 characters")),
    ({"text_input": "a"}, {"tenant": "b" * 257}, "INVALID_ARG", ("tenant='bbb", "256 characters")),
    ({"text_input": "a"}, {"tenant": "\ud800"}, "INVALID_ARG", ("tenant=", "256 characters")),
    (
        {"text_input": "a", "stream": True, "exclude_input_in_output": False},
        {},
        "INVALID_ARG",
        ("When streaming, `exclude_input_in_output` = False is not allowed.",),
    ),
    ({"text_input": "a", "image": "aGk="}, {}, "UNSUPPORTED", ("image", "4 bytes")),
    ({"text_input": "a", "sampling_parameters": '{"\\ud800": 1}'}, {}, "INVALID_ARG", (r"\ud800",)),
    ({"text_input": "a"}, {"stop": "\ud800"}, "INVALID_ARG", (r"stop='\ud800'",)),
    ({"text_input": "a", "sampling_parameters": HUGE}, {}, "INVALID_ARG", TOO_BIG),
    ({"text_input": "a", "sampling_parameters": b'"cancel_id"' + HUGE}, {}, "INVALID_ARG", TOO_BIG),
    ({"text_input": "a"}, {"x": "y" * 2**20}, "INVALID_ARG", ("request parameters", "1048576")),
    ({"text_input": "a", "embedding_request": "{}"}, {}, "UNSUPPORTED", ("embedding_request",)),
    ({"text_input": "a"}, {"n": 2}, "UNSUPPORTED", ("n=2",)),
    ({"text_input": "a", "sampling_parameters": '{"best_of": "3"}'}, {}, "UNSUPPORTED", ("best",)),
]


@pytest.mark.parametrize(("inputs", "parameters", "code", "words"), BAD_REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_gets_one_error_that_says_what_is_wrong(
    harness: Harness,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    code: str,
    words: tuple[str, ...],
    stream: bool,
) -> None:
    sender = harness.send({"stream": stream, **inputs}, parameters)
    (response,) = sender.wait_final()
    assert response.error is not None
    assert response.error.code == code
    assert response.error.message.startswith("Error generating stream: ")
    assert [word for word in words if word not in response.error.message] == []
    assert response.text() == "N/A"
    assert harness.engine.submitted == {}


@pytest.mark.parametrize(
    "raised",
    [FlowPrefillError("\ud800"), FlowPrefillError("x" * 2**20), ValueError("\ud800" * 2**20)],
)
def test_any_error_reaches_the_client_in_at_most_1000_characters(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def fail(*_: object) -> NoReturn:
        raise raised

    monkeypatch.setattr(harness.engine, "submit", fail)
    error = harness.send({"text_input": "a"}).error
    assert error is not None and error.code == "INTERNAL"
    assert len(error.message) <= 1000


def test_a_bug_of_ours_is_logged_with_where_it_is(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trip(*_: object) -> NoReturn:
        raise KeyError("bug")

    monkeypatch.setattr("flowprefill_backend.intake.parse", trip)
    assert harness.send({"text_input": "a"}).error is not None
    logged = "".join(line for line in harness.log.lines if "unexpected KeyError: 'bug'" in line)
    assert "in trip" in logged and "in _parse_and_submit" in logged


def test_an_id_that_is_no_text_is_answered_like_any_bad_input(harness: Harness) -> None:
    request = InferenceRequest({"text_input": "a"}, request_id=b"\xff")
    harness.instance.execute([request])
    error = request.sender.error
    assert error is not None and error.code == "INVALID_ARG"
    assert "the request's id must be UTF-8" in error.message
    assert not any("Traceback" in line or "unexpected" in line for line in harness.log.lines)


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input": "x" * 10_000},
        {"text_input": "a", "sampling_parameters": HUGE},
        {"text_input": "a", "image": "x" * 10_000},
    ],
)
def test_what_is_too_big_is_refused_before_it_waits_for_a_parser(
    harness: Harness, inputs: dict[str, Any]
) -> None:
    gates = [
        hold(harness.instance._intake.short_parser),
        hold(harness.instance._intake.long_parser),
    ]
    assert harness.send(inputs).error is not None
    for gate in gates:
        gate.set()


LONG = {"text_input": "a", "sampling_parameters": "{}" + " " * 2**15}


def test_short_and_long_requests_do_not_wait_for_each_other(harness: Harness) -> None:
    gate = hold(harness.instance._intake.long_parser)
    harness.send(LONG)
    harness.send({"text_input": "b"})
    harness.engine.wait_submitted(1)
    gate.set()
    harness.engine.wait_submitted(2)
    gate = hold(harness.instance._intake.short_parser)
    harness.send({"text_input": "b"})
    harness.send(LONG)
    harness.engine.wait_submitted(3)
    gate.set()
    harness.engine.wait_submitted(4)
    assert list(harness.engine.submitted) == [2, 1, 4, 3]


def test_a_full_parser_refuses_and_leaves_nothing_behind(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowprefill_backend.intake.MAX_WAITING", 1)
    harness = Harness(tokenizer)
    gate = hold(harness.instance._intake.short_parser)
    taken = harness.send({"text_input": "a"})
    refused = harness.send({"text_input": "a"})
    assert refused.error is not None and refused.error.code == "UNAVAILABLE"
    assert "1 requests" in refused.error.message
    gate.set()
    harness.engine.wait_submitted()
    assert [live.req_id for live in harness.instance._live.all()] == [1]
    harness.instance.close()
    taken.wait_final()


def test_a_request_that_waited_too_long_for_its_parser_is_unavailable(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, queue_timeout_ms=1)
    gate = hold(harness.instance._intake.short_parser)
    sender = harness.send({"text_input": "a"})
    threading.Event().wait(0.01)  # ten times what it may wait
    gate.set()
    assert sender.error is not None and sender.error.code == "UNAVAILABLE"
    assert "queue_timeout_ms=1" in sender.error.message
    harness.instance.close()
    assert harness.engine.submitted == {}


def test_lora_is_refused_in_vllm_backend_s_words(harness: Harness) -> None:
    sampling = json.dumps({"lora_name": "alpaca"})
    sender = harness.send({"text_input": "a", "sampling_parameters": sampling})
    assert sender.error is not None
    assert (sender.error.code, sender.error.message) == (
        "UNSUPPORTED",
        "LoRA feature is not enabled.",
    )


def test_inputs_that_ask_for_nothing_are_not_in_the_way(harness: Harness) -> None:
    sampling = json.dumps({"lora_name": None, "n": 1, "use_beam_search": "false"})
    inputs = {"text_input": "a", "image": "", "sampling_parameters": sampling}
    harness.send(inputs)
    harness.engine.wait_submitted()


def test_a_full_context_is_taken_and_one_token_more_is_refused(harness: Harness) -> None:
    num_tokens = len(harness.tokenizer.encode("the"))
    harness.send({"text_input": "the"}, {"max_tokens": 100 - num_tokens})
    harness.engine.wait_submitted()
    error = harness.send({"text_input": "the"}, {"max_tokens": 101 - num_tokens}).error
    assert error is not None and f"prompt of {num_tokens} tokens" in error.message


class StrangeError(FlowPrefillError):
    code = "NO_SUCH_CODE"


@pytest.mark.parametrize(
    ("raised", "code"),
    [(QueueFullError("16 requests wait"), "UNAVAILABLE"), (StrangeError("?"), "INTERNAL")],
)
def test_what_the_engine_refuses_is_answered_under_its_own_code(
    harness: Harness, raised: FlowPrefillError, code: str
) -> None:
    harness.engine.submit_error = raised
    error = harness.send({"text_input": "a"}).error
    assert error is not None
    assert (error.code, error.message) == (code, f"Error generating stream: {raised}")


def test_a_caller_inside_the_server_finds_the_code_in_the_text(harness: Harness) -> None:
    error = harness.send({"text_input": ""}, {"error_code_in_message": True}).error
    assert error is not None and error.message.startswith("[INVALID_ARG] Error generating stream: ")
