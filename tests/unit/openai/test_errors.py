"""What the server said -> HTTP status and OpenAI's error object."""

from __future__ import annotations

import pytest

from flowprefill.admission import Admission
from flowprefill.errors import QueueFullError
from flowprefill.openai.errors import ApiError
from flowprefill.openai.schemas import ChatRequest
from flowprefill.openai.translate import COMPLETION_FIELDS, chat_fields
from flowprefill.retry_after import read_retry_after_s, with_retry_after
from flowprefill_client import ServerError

PREFIX = "Error generating stream: "


@pytest.mark.parametrize(
    ("code", "text", "status", "error_type", "error_code"),
    [
        ("INVALID_ARG", f"{PREFIX}top_p=7: must be", 400, "invalid_request_error", "invalid_value"),
        ("UNSUPPORTED", f"{PREFIX}best_of=2 is not", 400, "invalid_request_error", "unsupported"),
        ("UNAVAILABLE", f"{PREFIX}the engine restarts", 503, "service_unavailable_error", None),
        ("UNAVAILABLE", "UNAVAILABLE: no route to host", 503, "service_unavailable_error", None),
        ("CANCELLED", "Request was cancelled", 499, "invalid_request_error", None),
        ("INTERNAL", f"{PREFIX}oops", 500, "server_error", None),
        ("DEADLINE_EXCEEDED", "late", 500, "server_error", None),
        ("NOT_FOUND", "Request for unknown model: 'x' is not found", 404, "invalid_request_error",
         "model_not_found"),
        (None, "the server closed the stream", 500, "server_error", None),
    ],
)  # fmt: skip
def test_each_code_has_its_status(
    code: str | None, text: str, status: int, error_type: str, error_code: str | None
) -> None:
    error = ApiError.from_server(ServerError(text, code), {})
    assert error.status == status
    body = error.body["error"]
    assert (body["type"], body["code"]) == (error_type, error_code)
    assert body["message"] and PREFIX not in body["message"]


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("top_p=7: must be", "top_p", "top_p=7: must be"),
        ("text_input='': must be", "prompt", "prompt='': must be"),
        ("text_input[3]=-1: must be", "prompt[3]", "prompt[3]=-1: must be"),
        ("messages[0].role='': must", "messages[0].role", "messages[0].role='': must"),
        ("'tpo_p'=7: must be left out", "tpo_p", "tpo_p=7: must be left out"),
        ("prompt of 9 tokens + max_tokens=7 > 8", None, "prompt of 9 tokens + max_tokens=7 > 8"),
    ],
)
def test_the_field_at_fault_is_named_as_the_client_calls_it(
    text: str, param: str | None, message: str
) -> None:
    error = ApiError.from_server(ServerError(PREFIX + text, "INVALID_ARG"), COMPLETION_FIELDS)
    assert error.body["error"]["param"] == param
    assert error.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("text_input[1]=-1: must be", "messages[1]"),
        ("logprobs=-1: must be", "top_logprobs"),
        ("max_tokens=-1: must be", "max_completion_tokens"),
    ],
)
def test_a_chat_has_names_of_its_own(text: str, param: str) -> None:
    request = ChatRequest(model="m", messages=[], max_completion_tokens=-1)
    error = ApiError.from_server(ServerError(PREFIX + text, "INVALID_ARG"), chat_fields(request))
    assert error.body["error"]["param"] == param
    assert error.body["error"]["message"].startswith(f"{param}=-1")


def test_the_old_name_of_the_limit_is_kept_where_it_was_used() -> None:
    request = ChatRequest(model="m", messages=[], max_tokens=-1)
    assert chat_fields(request)["max_tokens"] == "max_tokens"


def test_a_full_queue_is_a_429_with_the_time_that_it_needs() -> None:
    admission = Admission(1, None, 60.0)
    admission.admit(1, 5_000, 0.0, prefill_s=7.25)
    with pytest.raises(QueueFullError) as full:
        admission.admit(2, 10, 0.0, prefill_s=0.1)
    error = ApiError.from_server(ServerError(PREFIX + str(full.value), "UNAVAILABLE"), {})
    assert (error.status, error.code) == (429, "queue_full")
    assert error.headers == {"retry-after": "8"}


@pytest.mark.parametrize(("hint_s", "seconds"), [(0.0, 1), (0.3, 1), (1.01, 1), (1.2, 2)])
def test_retry_after_is_whole_seconds_and_at_least_one(hint_s: float, seconds: int) -> None:
    message = with_retry_after("the engine died", hint_s)
    error = ApiError.from_server(ServerError(message, "UNAVAILABLE"), {})
    assert error.headers == {"retry-after": str(seconds)}


def test_a_message_without_a_hint_says_nothing_of_time() -> None:
    assert read_retry_after_s("the queue is full; try again later") is None
    assert read_retry_after_s("try again in 3 s; or not") is None
    assert ApiError(503, "stopping").headers == {"retry-after": "1"}
    assert ApiError(400, "bad").headers == {}


def test_a_long_message_is_cut() -> None:
    assert len(ApiError(500, "x" * 5_000).body["error"]["message"]) == 1_000
