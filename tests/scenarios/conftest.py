"""The scenarios of operators' threads, numbered as rows; each row is a test here or elsewhere.

A test of this folder begins its docstring with "Row N, THREAD: the symptom". Tests of other folders
that play a row are listed in ELSEWHERE of a file here. test_accounted.py checks that no row lacks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.server import TritonServer, free_ports
from tests.live_server import LOAD_TIMEOUT_S, MODEL, unload, wait_for

KEEP_ALIVE_S = 0.3
"""Of the endpoint here: tests wait for comments."""
SMALL_MODEL = "small"
SMALL_MAX_LEN = 256


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A scenario that has the session's server needs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "server" in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.e2e)


def status(url: str) -> int:
    """HTTP status of a GET, errors included."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def ask_triton(server: TritonServer, model: str, way: str, body: dict[str, Any]) -> str:
    """What Triton's generate or generate_stream answers, errors included; their status means
    little."""
    url = f"http://{server.http_url}/v2/models/{model}/{way}"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as reply:
            answer: bytes = reply.read()
    except urllib.error.HTTPError as error:
        with error:
            answer = error.read()
    return answer.decode()


@contextlib.contextmanager
def openai_endpoint(server: TritonServer, **settings: Any) -> Iterator[int]:
    """Port of an OpenAI endpoint in this process, in front of a tritonserver; settings: fields of
    its Settings."""
    from flowprefill.openai.app import Endpoint, Settings
    from flowprefill.openai.server import make_server

    (port,) = free_ports(1)
    endpoint = Endpoint(Settings(server.grpc_url, exit_timeout_s=5, **settings))
    running = make_server(endpoint, "127.0.0.1", port)
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: running.started and endpoint.models.is_ready, what="the endpoint is ready")
    try:
        yield port
    finally:
        running.drain()
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="package")
def openai_port(server: TritonServer) -> Iterator[int]:
    with openai_endpoint(server, keep_alive_s=KEEP_ALIVE_S) as port:
        yield port


@pytest.fixture(scope="package")
def small_model(server: TritonServer, repository: Path, openai_port: int) -> Iterator[str]:
    """Name of a model with a short context and an engine of its own, whose requests nobody else
    counts; the OpenAI endpoint knows it."""
    import tritonclient.http as httpclient

    shutil.copytree(repository / MODEL, repository / SMALL_MODEL)
    path = repository / SMALL_MODEL / "1" / "model.json"
    settings: dict[str, Any] = {"max_model_len": SMALL_MAX_LEN}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    http = httpclient.InferenceServerClient(server.http_url, network_timeout=LOAD_TIMEOUT_S)
    http.load_model(SMALL_MODEL)
    url = f"http://127.0.0.1:{openai_port}/v1/models/{SMALL_MODEL}"
    wait_for(lambda: status(url) == 200, what="the endpoint knows the model")
    yield SMALL_MODEL
    unload(http, SMALL_MODEL)
    http.close()
    shutil.rmtree(repository / SMALL_MODEL)
