"""A stand-in for the server's side of triton_python_backend_utils.

The Python half of that module (ModelConfig and helpers) is the server's own file from the wheel;
what the stub adds in C++ is imitated here, with the rules that it enforces or relies on.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

WAIT_S = 10.0


def install() -> ModuleType:
    """Make `import triton_python_backend_utils` work outside the server."""
    name = "triton_python_backend_utils"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("pytriton")
    assert package and package.origin, "nvidia-pytriton carries the server's Python file"
    path = Path(package.origin).parent / "tritonserver" / "backends" / "python" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__.update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        TritonModelException=TritonModelException,
        Logger=Logger,
        MetricFamily=MetricFamily,
    )
    sys.modules[name] = module
    return module


class TritonModelException(Exception):
    pass


def utf8(text: str) -> str:
    """Text as pybind11 takes it: what UTF-8 cannot hold is refused."""
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise TypeError("incompatible function arguments") from error


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert array.dtype != np.object_ or all(type(element) is bytes for element in array.flat)
        self._name = utf8(name)
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


@dataclass(frozen=True)
class TritonError:
    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    message: str
    code: str = "INTERNAL"

    def __post_init__(self) -> None:
        utf8(self.message)


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self.error = error
        self.outputs = {t.name(): t.as_numpy() for t in (output_tensors or [])}

    def text(self, name: str = "text_output") -> str:
        (value,) = self.outputs[name]
        return value.decode("utf-8")


class Logger:
    lines: list[str] = []  # noqa: RUF012, one log for all, as in the server

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.lines.append(utf8(message))

    log_warn = log_error = log_verbose = log_info


class Metric:
    """A series, with what the server allows of its kind."""

    def __init__(self, kind: str, buckets: list[float] | None) -> None:
        assert (buckets is not None) == (kind == MetricFamily.HISTOGRAM)
        self._kind = kind
        self.number = 0.0
        self.observed: list[float] = []

    def increment(self, by: float) -> None:
        assert self._kind != MetricFamily.HISTOGRAM
        assert by >= 0 or self._kind == MetricFamily.GAUGE
        self.number += by

    def set(self, value: float) -> None:
        assert self._kind == MetricFamily.GAUGE
        self.number = value

    def observe(self, value: float) -> None:
        assert self._kind == MetricFamily.HISTOGRAM
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    is_supported = True

    def __init__(self, name: str, description: str, kind: str) -> None:
        if not self.is_supported:
            raise TritonModelException("metrics not supported")
        self.name = utf8(name)
        self.kind = kind
        self.series: dict[tuple[tuple[str, str], ...], Metric] = {}

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        key = tuple(sorted((utf8(k), utf8(v)) for k, v in labels.items()))
        assert key not in self.series, "a series is created once"
        self.series[key] = Metric(self.kind, buckets)
        return self.series[key]


@dataclass
class ResponseSender:
    """Records what a client gets, and every breach of the server's rules."""

    responses: list[InferenceResponse] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    num_polls: int = 0
    fails_at: int | None = None
    """The send that raises, counted from 0, as one without shared memory does."""
    poll_ends: threading.Event | None = None
    """Holds every poll until it is set."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._num_sends = 0
        self._num_polling = 0
        self.poll_begun = threading.Event()
        self._is_client_gone = threading.Event()
        self._final = threading.Event()
        self._responded = threading.Condition()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        with self._lock:
            if self._final.is_set():
                self.breaches.append("send after FINAL")
                raise TritonModelException("Response sender has been closed.")
            self._num_sends += 1
            if self._num_sends - 1 == self.fails_at:
                raise TritonModelException("Failed to increase the shared memory pool size")
            if flags and self._num_polling:
                self.breaches.append("FINAL during is_cancelled")
            with self._responded:
                if response is not None:
                    self.responses.append(response)
                if flags:
                    self._final.set()
                self._responded.notify_all()

    def is_cancelled(self) -> bool:
        with self._lock:
            if self._final.is_set():
                self.breaches.append("is_cancelled after FINAL")
            self.num_polls += 1
            self._num_polling += 1
        self.poll_begun.set()
        # The lock is open here, as the server is free to act on other calls during this one.
        if self.poll_ends:
            self.poll_ends.wait(WAIT_S)
        is_gone = self._is_client_gone.wait(0.0002)
        with self._lock:
            self._num_polling -= 1
        return is_gone

    # -- for tests --------------------------------------------------------------------------------

    def leave(self) -> None:
        """The client goes away."""
        self._is_client_gone.set()

    @property
    def is_final(self) -> bool:
        return self._final.is_set()

    def wait_final(self) -> list[InferenceResponse]:
        assert self._final.wait(WAIT_S), f"no FINAL after {len(self.responses)} responses"
        assert self.breaches == []
        return self.responses

    def wait_responses(self, count: int) -> None:
        with self._responded:
            assert self._responded.wait_for(lambda: len(self.responses) >= count, WAIT_S)

    @property
    def error(self) -> TritonError | None:
        return self.wait_final()[-1].error

    @property
    def text(self) -> str:
        return "".join(response.text() for response in self.wait_final())


class InferenceRequest:
    """A request as execute() gets it. Inputs by name: text, bytes, bool, a number or an array."""

    def __init__(
        self,
        inputs: dict[str, Any],
        parameters: dict[str, Any] | None = None,
        request_id: str | bytes = "",
        sender: ResponseSender | None = None,
        timeout_us: int = 0,
    ) -> None:
        self.sender = sender or ResponseSender()
        self._timeout_us = timeout_us
        self._inputs = [Tensor(name, to_array(value)) for name, value in inputs.items()]
        self._parameters = json.dumps(parameters or {})
        self._request_id = request_id

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        """HTTP clients may send bytes that are no text."""
        return self._request_id if isinstance(self._request_id, str) else self._request_id.decode()

    def timeout(self) -> int:
        return self._timeout_us

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def to_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.array([value], dtype=np.object_)
    return np.array([value], dtype=np.bool_ if isinstance(value, bool) else np.float32)
