"""A request/response face of a decoupled model: one request, one answer with the whole text.

execute() only hands over, so many requests are under way at once. When a client leaves, or the
timeout of its request passes, the request is cancelled in the decoupled model, where it has an id
of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

NUM_WAITERS = 64
"""Requests under way at most; more wait here. A waiter is a thread that sleeps in a call."""
MAX_LIVE = 1_000
"""Requests under way and waiting at most; more are UNAVAILABLE."""
POLL_S = 0.1
"""How often a departure or a timeout is looked for, as far as MAX_POLLS_PER_S allows."""
MAX_POLLS_PER_S = 2_000
"""One poll costs the server's only service thread about 24 us, so this is 5% of it at most."""
MAX_ERROR_CHARS = 1_000

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass
class Call:
    """One request under way."""

    sender: Any
    target_id: str
    """Its id at the decoupled model; unique, unlike the client's own."""
    inputs: list[Any]
    parameters: dict[str, Any]
    deadline_s: float | None
    reason: Any = None
    """TritonError that explains why the call was cancelled from here."""
    is_asked: bool = False
    """It is, or was, at the decoupled model."""
    is_cancelled: bool = False
    """The decoupled model has confirmed that it cancelled it."""
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class TritonPythonModel:
    """Calls the model named by the parameter target_model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._target = parameters["target_model"]["string_value"]
        outputs = json.loads(args["model_config"])["output"]
        self._output_names = [output["name"] for output in outputs]
        self._serials = itertools.count()
        self._prefix = uuid.uuid4().hex
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._live: dict[str, Call] = {}
        self._is_live = threading.Condition()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._wait_for_answers) for _ in range(NUM_WAITERS)
        ]
        self._threads.append(threading.Thread(target=self._watch))
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand over; the answer goes through the response sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                error = self._accept(request, sender)
            except Exception as exception:  # whatever it is, this client must hear of it
                error = make_error(str(exception))
            if error is not None:
                answer(sender, [], error)

    def _accept(self, request: Any, sender: Any) -> Any:
        """Hand one request over. Returns the error of one that is refused."""
        timeout_s = request.timeout() / 1e6
        call = Call(
            sender=sender,
            target_id=f"{self._prefix}-{next(self._serials)}",
            # Copies: the server frees the request's memory when execute() returns.
            inputs=[copy_tensor(tensor) for tensor in request.inputs()],
            parameters=json.loads(request.parameters() or "{}"),
            deadline_s=time.monotonic() + timeout_s if timeout_s else None,
        )
        with self._is_live:
            if len(self._live) >= MAX_LIVE:
                text = f"{len(self._live)} requests are under way, the most that are taken"
                return make_error(text, pb_utils.TritonError.UNAVAILABLE)
            self._live[call.target_id] = call
            self._is_live.notify()
        self._waiting.put(call)
        return None

    def finalize(self) -> None:
        with self._is_live:
            self._is_closing = True
            self._is_live.notify()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout=0.1)

    def _wait_for_answers(self) -> None:
        while True:
            call = self._waiting.get()
            if call is None:
                return
            try:
                # Before the look at the reason: whoever gives one later finds the call asked.
                call.is_asked = True
                tensors, error = ([], call.reason) if call.reason else self._ask(call)
                # A cancelled call may return part of the text; the client asked for all of it.
                error = call.reason or error
            except Exception as exception:  # whatever it is, this client must hear of it
                tensors, error = [], make_error(str(exception))
            with self._is_live:
                self._live.pop(call.target_id, None)
            with call.lock:
                call.is_closed = True
            answer(call.sender, tensors, error)

    def _ask(self, call: Call) -> tuple[list[Any], Any]:
        """Call the decoupled model. Returns its tensors and its error; one of them is empty."""
        for response in self._request(call.target_id, call.inputs, call.parameters):
            if response.has_error():
                return [], restore_code(response.error().message())
            if response.output_tensors():
                return [copy_tensor(tensor) for tensor in response.output_tensors()], None
        return [], make_error(f"{self._target} gave no answer")

    def _request(self, request_id: str, inputs: list[Any], parameters: dict[str, Any]) -> list[Any]:
        request = pb_utils.InferenceRequest(
            request_id=request_id,
            model_name=self._target,
            inputs=inputs,
            requested_output_names=self._output_names,
            # Calls between models carry no fractions; the target takes numbers as text, too.
            parameters={
                **{k: str(v) if isinstance(v, float) else v for k, v in parameters.items()},
                "error_code_in_message": True,
            },
        )
        return list(request.exec(decoupled=True))

    def _watch(self) -> None:
        """Cancel what nobody waits for any more; sleeps while nothing is under way.

        A cancel that comes before the decoupled model knows the request is repeated.
        """
        while True:
            with self._is_live:
                self._is_live.wait_for(lambda: self._is_closing or self._live)
                pause_s = max(POLL_S, len(self._live) / MAX_POLLS_PER_S)
                self._is_live.wait_for(lambda: self._is_closing, timeout=pause_s)
                if self._is_closing:
                    return
                calls = list(self._live.values())
            for call in calls:
                try:
                    call.reason = call.reason or find_reason(call)
                    if call.reason and call.is_asked and not call.is_cancelled:
                        call.is_cancelled = self._cancel(call)
                except Exception as error:  # the others must still be looked after
                    warn(f"cannot cancel a request of {self._target}: {error}")

    def _cancel(self, call: Call) -> bool:
        """Returns False if the decoupled model does not know the request yet, or any more."""
        text = pb_utils.Tensor("text_input", np.array([b""], dtype=np.object_))
        replies = self._request("", [text], {"cancel_id": call.target_id})
        texts = [tensor.as_numpy()[0] for reply in replies for tensor in reply.output_tensors()]
        return b"cancelled" in texts


def find_reason(call: Call) -> Any:
    """Why nobody waits for `call` any more, as a TritonError, or None."""
    if call.deadline_s is not None and time.monotonic() > call.deadline_s:
        return pb_utils.TritonError("Request timeout expired", pb_utils.TritonError.UNAVAILABLE)
    # The server frees what is asked about with the answer, so the answer waits for this lock.
    with call.lock:
        if not call.is_closed and call.sender.is_cancelled():
            return pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
    return None


def answer(sender: Any, tensors: list[Any], error: Any) -> None:
    """Send the one response of a request."""
    try:
        response = pb_utils.InferenceResponse(output_tensors=tensors, error=error)
        sender.send(response, flags=FINAL)
    except Exception as exception:  # such as no memory for a long text; an error needs little
        with contextlib.suppress(Exception):
            error = make_error("the answer cannot be sent")
            sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)
        warn(f"an answer cannot be sent: {exception}")


def warn(text: str) -> None:
    """Log what has no other effect, even if it cannot be logged."""
    with contextlib.suppress(Exception):
        pb_utils.Logger.log_warn(shorten(text))


def make_error(text: str, code: Any = None) -> Any:
    """A TritonError, INTERNAL by default, whose text the server takes, whatever it says."""
    return pb_utils.TritonError(
        shorten(text), pb_utils.TritonError.INTERNAL if code is None else code
    )


def shorten(text: str) -> str:
    """The beginning of `text`; what UTF-8 cannot hold becomes "?"."""
    return text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()


def restore_code(message: str) -> Any:
    """The error behind "[CODE] text": a call between models passes on nothing but the text."""
    match = re.match(r"\[([A-Z_]+)\] ", message)
    code = getattr(pb_utils.TritonError, match[1], None) if match else None
    if match is None or code is None:
        return make_error(message)
    return make_error(message[match.end() :], code)


def copy_tensor(tensor: Any) -> Any:
    """A tensor whose memory is its own."""
    return pb_utils.Tensor(tensor.name(), tensor.as_numpy().copy())
