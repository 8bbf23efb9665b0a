"""The endpoint in front of a scripted gRPC server that plays tritonserver."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from flowprefill.openai.app import Endpoint, Settings
from flowprefill.openai.server import DrainingServer, make_server
from flowprefill.server import free_ports
from tests.live_server import wait_for
from tests.unit.test_client import FakeTriton

WAIT_S = 10.0
DECOUPLED = {"m": True, "vllm": True, "facade": False}


class FakeServer(FakeTriton):
    """FakeTriton with a repository: `m`, vLLM's, and a facade that is not decoupled."""

    def __init__(self) -> None:
        super().__init__()
        self.models = list(DECOUPLED)
        self.refuses_questions = False  # as a server that stops, and still answers
        self.num_refused = 0

    def ServerLive(self, request: Any, context: Any) -> Any:
        if self.refuses_questions:
            self.num_refused += 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        models = [{"name": name, "state": "READY"} for name in self.models]
        return service_pb2.RepositoryIndexResponse(models=models)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelConfigResponse()
        answer.config.input.add(name="sampling_parameters")
        if request.name == "m":  # of this backend
            answer.config.input.add(name="return_timing")
        answer.config.model_transaction_policy.decoupled = DECOUPLED[request.name]
        return answer


@dataclass
class Running:
    """The endpoint and what it stands in front of."""

    fake: FakeServer
    grpc_server: grpc.Server
    endpoint: Endpoint
    server: DrainingServer
    thread: threading.Thread
    port: int

    def ask(
        self, body: dict[str, Any] | bytes | None, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any]:
        """Status, and JSON or the lines of a stream."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = json.dumps({"model": "m", **body}).encode() if isinstance(body, dict) else body
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.getheader("content-type") == "application/json":
            return response.status, json.loads(text)
        return response.status, text.split("\n\n")

    def send(self, body: dict[str, Any]) -> socket.socket:
        """An open connection on which a request was sent."""
        data = json.dumps({"model": "m", **body}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextlib.contextmanager
def running_endpoint(
    settings: Settings, fake: FakeServer, server: grpc.Server
) -> Iterator[Running]:
    """One that has found the models of `fake`."""
    (port,) = free_ports(1)
    endpoint = Endpoint(settings)
    openai = make_server(endpoint, "127.0.0.1", port)
    thread = threading.Thread(target=openai.run)
    thread.start()
    wait_for(lambda: openai.started)
    assert endpoint.models.is_ready
    try:
        yield Running(fake, server, endpoint, openai, thread, port)
    finally:
        openai.drain()
        thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture
def fake_server() -> Iterator[tuple[FakeServer, grpc.Server, int]]:
    """And the port of its gRPC."""
    fake = FakeServer()
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, server, port
    server.stop(None).wait()


@pytest.fixture
def running(fake_server: tuple[FakeServer, grpc.Server, int]) -> Iterator[Running]:
    fake, server, grpc_port = fake_server
    settings = Settings(
        f"127.0.0.1:{grpc_port}", keep_alive_s=0.02, exit_timeout_s=0.2, engines_s=0.05
    )
    with running_endpoint(settings, fake, server) as started:
        yield started
