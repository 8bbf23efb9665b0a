"""A request/response face of a decoupled model: one request, one answer with the whole text.

execute() only hands over, so many requests are under way at once. When a client leaves, or the
timeout of its request passes, the request is cancelled in the decoupled model, where it has an id
of its own.
"""

from __future__ import annotations

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
POLL_S = 0.1
"""How often a departure or a timeout is looked for."""

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
            timeout_s = request.timeout() / 1e6
            call = Call(
                sender=request.get_response_sender(),
                target_id=f"{self._prefix}-{next(self._serials)}",
                # Copies: the server frees the request's memory when this method returns.
                inputs=[copy_tensor(tensor) for tensor in request.inputs()],
                parameters=json.loads(request.parameters() or "{}"),
                deadline_s=time.monotonic() + timeout_s if timeout_s else None,
            )
            with self._is_live:
                self._live[call.target_id] = call
                self._is_live.notify()
            self._waiting.put(call)

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
                tensors, error = ([], call.reason) if call.reason else self._ask(call)
                # A cancelled call may return part of the text; the client asked for all of it.
                error = call.reason or error
            except Exception as exception:  # whatever it is, this client must hear of it
                tensors, error = [], pb_utils.TritonError(str(exception))
            with self._is_live:
                self._live.pop(call.target_id, None)
            with call.lock:
                call.is_closed = True
            response = pb_utils.InferenceResponse(output_tensors=tensors, error=error)
            call.sender.send(response, flags=FINAL)

    def _ask(self, call: Call) -> tuple[list[Any], Any]:
        """Call the decoupled model. Returns its tensors and its error; one of them is empty."""
        for response in self._request(call.target_id, call.inputs, call.parameters):
            if response.has_error():
                return [], restore_code(response.error().message())
            if response.output_tensors():
                return [copy_tensor(tensor) for tensor in response.output_tensors()], None
        return [], pb_utils.TritonError(f"{self._target} gave no answer")

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
        """Cancel what nobody waits for any more; sleeps while nothing is under way."""
        while True:
            with self._is_live:
                self._is_live.wait_for(lambda: self._is_closing or self._live)
                self._is_live.wait_for(lambda: self._is_closing, timeout=POLL_S)
                if self._is_closing:
                    return
                calls = list(self._live.values())
            for call in calls:
                if call.reason is None:
                    call.reason = find_reason(call)
                    if call.reason is not None:
                        self._cancel(call)

    def _cancel(self, call: Call) -> None:
        text = pb_utils.Tensor("text_input", np.array([b""], dtype=np.object_))
        try:
            self._request("", [text], {"cancel_id": call.target_id})
        except Exception as error:  # the call itself fails as well, and tells its client
            pb_utils.Logger.log_warn(f"cannot cancel a request of {self._target}: {error}")


def find_reason(call: Call) -> Any:
    """Why nobody waits for `call` any more, as a TritonError, or None."""
    if call.deadline_s is not None and time.monotonic() > call.deadline_s:
        return pb_utils.TritonError("Request timeout expired", pb_utils.TritonError.UNAVAILABLE)
    # The server frees what is asked about with the answer, so the answer waits for this lock.
    with call.lock:
        if not call.is_closed and call.sender.is_cancelled():
            return pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
    return None


def restore_code(message: str) -> Any:
    """The error behind "[CODE] text": a call between models passes on nothing but the text."""
    match = re.match(r"\[([A-Z_]+)\] ", message)
    code = getattr(pb_utils.TritonError, match[1], None) if match else None
    if match is None or code is None:
        return pb_utils.TritonError(message)
    return pb_utils.TritonError(message[match.end() :], code)


def copy_tensor(tensor: Any) -> Any:
    """A tensor whose memory is its own."""
    return pb_utils.Tensor(tensor.name(), tensor.as_numpy().copy())
