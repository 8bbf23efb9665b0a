"""model_repository/smollm2_sync outside the server; the decoupled model it calls is imitated."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.backend.fake_pb_utils import (
    WAIT_S,
    InferenceRequest,
    ResponseSender,
    Tensor,
    TritonModelException,
    to_array,
)

FILE = Path(__file__).parents[2] / "model_repository" / "smollm2_sync" / "1" / "model.py"


@dataclass
class Reply:
    """What a call between models returns."""

    text: str = ""
    error_text: str = ""

    def has_error(self) -> bool:
        return bool(self.error_text)

    def error(self) -> Any:
        return type("Error", (), {"message": lambda _: self.error_text})()

    def output_tensors(self) -> list[Tensor]:
        return [Tensor("text_output", to_array(self.text))] if self.text else []


@dataclass
class Target:
    """A decoupled model whose requests run until they are cancelled, or `answer` says otherwise."""

    knows_requests: threading.Event = field(default_factory=threading.Event)
    answer: Callable[[], Reply] | None = None
    live: dict[str, threading.Event] = field(default_factory=dict)
    num_cancels: int = 0
    was_missed: threading.Event = field(default_factory=threading.Event)

    def call(self, request_id: str, parameters: dict[str, Any]) -> Reply:
        if "cancel_id" in parameters:
            return Reply("cancelled" if self.cancel(parameters["cancel_id"]) else "not found")
        if self.answer:
            return self.answer()
        is_cancelled = threading.Event()
        self.knows_requests.wait(WAIT_S)
        self.live[request_id] = is_cancelled
        is_cancelled.wait(2 * WAIT_S)
        return Reply(error_text="[CANCELLED] Request was cancelled")

    def cancel(self, request_id: str) -> bool:
        self.num_cancels += 1
        is_found = request_id in self.live
        if is_found:
            self.live[request_id].set()
        else:
            self.was_missed.set()
        return is_found


@dataclass
class Facade:
    module: ModuleType
    model: Any
    target: Target

    def send(self, sender: ResponseSender | None = None, **request: Any) -> ResponseSender:
        inference_request = InferenceRequest({"text_input": "a"}, sender=sender, **request)
        self.model.execute([inference_request])
        return inference_request.sender


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Facade]:
    spec = importlib.util.spec_from_file_location("smollm2_sync_model", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    with monkeypatch.context() as without_server:
        # As where the server completes the configuration: there is no C++ half.
        for name in ("InferenceResponse", "Logger", "Tensor", "TritonError"):
            without_server.delattr(sys.modules["triton_python_backend_utils"], name)
        spec.loader.exec_module(module)
    target = Target()

    class Request:
        def __init__(self, request_id: str, parameters: dict[str, Any], **_: Any) -> None:
            self.exec = lambda decoupled: iter([target.call(request_id, parameters), Reply()])

    monkeypatch.setattr(module.pb_utils, "InferenceRequest", Request, raising=False)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    model = module.TritonPythonModel()
    config = {"parameters": {"target_model": {"string_value": "target"}}, "output": []}
    model.initialize({"model_config": json.dumps(config)})
    yield Facade(module, model, target)
    target.knows_requests.set()
    model.finalize()


def test_a_cancel_that_came_too_early_is_repeated(facade: Facade) -> None:
    sender = facade.send()
    sender.leave()
    assert facade.target.was_missed.wait(WAIT_S)
    facade.target.knows_requests.set()
    assert sender.error is not None and sender.error.code == "CANCELLED"
    assert len(facade.target.live) == 1


def test_a_timeout_cancels_the_request_in_the_decoupled_model(facade: Facade) -> None:
    facade.target.knows_requests.set()
    sender = facade.send(timeout_us=1)
    assert sender.error is not None and sender.error.code == "UNAVAILABLE"
    assert len(facade.target.live) == 1


def test_requests_over_the_bound_are_unavailable(
    facade: Facade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade.module, "MAX_LIVE", 2)
    taken = [facade.send(), facade.send()]
    refused = facade.send()
    assert refused.error is not None and refused.error.code == "UNAVAILABLE"
    assert "2 requests are under way" in refused.error.message
    facade.target.knows_requests.set()
    for sender in taken:
        sender.leave()
        sender.wait_final()
    facade.target.answer = lambda: Reply("there is room again")
    assert facade.send().text == "there is room again"


def test_polls_are_bounded(facade: Facade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade.module, "MAX_POLLS_PER_S", 100)
    begin_s = time.monotonic()
    senders = [facade.send() for _ in range(10)]
    threading.Event().wait(0.5)
    num_polls = sum(sender.num_polls for sender in senders)
    # Two rounds more: one of the first requests alone, one at the end.
    assert 10 <= num_polls <= 100 * (time.monotonic() - begin_s) + 20
    facade.target.knows_requests.set()
    for sender in senders:
        sender.leave()
        sender.wait_final()


def test_an_answer_that_cannot_be_sent_ends_in_an_error_and_spares_the_next(
    facade: Facade, monkeypatch: pytest.MonkeyPatch
) -> None:
    facade.target.answer = lambda: Reply("text")
    num_waiters = facade.module.NUM_WAITERS
    for _ in range(num_waiters + 1):  # every waiter gets one
        error = facade.send(ResponseSender(fails_at=0)).error
        assert error is not None and "cannot be sent" in error.message
    assert facade.send().text == "text"


@pytest.mark.parametrize("text", ["\ud800", "x" * 2**20])
def test_whatever_the_call_raises_reaches_the_client(facade: Facade, text: str) -> None:
    def fail() -> Reply:
        raise TritonModelException(text)

    facade.target.answer = fail
    error = facade.send().error
    assert error is not None and error.code == "INTERNAL" and len(error.message) <= 1000


def test_a_request_that_cannot_be_read_is_answered(
    facade: Facade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceRequest, "parameters", lambda _: "{")
    error = facade.send().error
    assert error is not None and error.code == "INTERNAL"


def test_the_code_of_an_error_is_restored(facade: Facade) -> None:
    facade.target.answer = lambda: Reply(error_text="[INVALID_ARG] top_p=7")
    error = facade.send().error
    assert error is not None and (error.code, error.message) == ("INVALID_ARG", "top_p=7")
