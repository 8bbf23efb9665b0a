"""One real tritonserver for the whole test session, with a repository that tests may add to.

A plugin of tests/conftest.py, so that tests of several folders share the server. Clients are
imported where they are used: tests without a server load this file as well.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowprefill.server import ServerOptions, TritonServer, free_ports

if TYPE_CHECKING:
    from flowprefill_client import Client

ROOT = Path(__file__).parents[1]
MODEL = "smollm2"
SYNC_MODEL = "smollm2_sync"
LONG_PROMPT = "All work and no play makes Jack a dull boy. " * 550  # about 6,600 tokens
LOAD_TIMEOUT_S = 120.0
WAIT_S = 60.0
"""For what takes a moment: a test is told that it hangs, not how fast the machine is."""


def wait_for(condition: Callable[[], Any], timeout_s: float = WAIT_S, what: str = "") -> Any:
    """The first true value of `condition`; fails after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"not within {timeout_s} s: {what or condition}")


def is_unloaded(http: Any, name: str) -> bool:
    """Whether a model's last instance has gone. The server as a whole may not be ready for the sake
    of another test's model."""
    states = {
        (model.get("state"), model.get("reason"))
        for model in http.get_model_repository_index()
        if model["name"] == name
    }
    return states == {("UNAVAILABLE", "unloaded")}


def unload(http: Any, name: str, timeout_s: float = LOAD_TIMEOUT_S) -> None:
    """Unload a model and wait until it is."""
    http.unload_model(name)
    wait_for(lambda: is_unloaded(http, name), timeout_s, f"{name} is unloaded")


def group_members(group: int) -> dict[int, str]:
    """Pid -> command line of every living process in a process group."""
    members = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # a zombie has none
                    members[int(entry.name)] = command
        except (ProcessLookupError, FileNotFoundError):
            continue
    return members


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's model repository."""
    target = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "model_repository", target, dirs_exist_ok=True)
    return target


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
    )
    with TritonServer(options) as running:
        yield running


@pytest.fixture(scope="session")
def quarter_prefill_s(server: TritonServer) -> float:
    """What a quarter of LONG_PROMPT takes here, and half a second at least, as clients and tests
    take their time as well: little, compared with the whole."""
    from flowprefill_client import Client

    with Client(server.grpc_url, MODEL) as client:
        text = "Once more. " + LONG_PROMPT[: len(LONG_PROMPT) // 4]
        ttft_s = client.generate(text, max_tokens=1).ttft_s
    assert ttft_s is not None
    return max(0.5, ttft_s)


@pytest.fixture
def http(server: TritonServer) -> Iterator[Any]:
    import tritonclient.http as httpclient

    client = httpclient.InferenceServerClient(server.http_url, network_timeout=LOAD_TIMEOUT_S)
    yield client
    client.close()


@pytest.fixture
def grpc(server: TritonServer) -> Iterator[Any]:
    import tritonclient.grpc as grpcclient

    client = grpcclient.InferenceServerClient(server.grpc_url)
    yield client
    client.close()


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    from flowprefill_client import Client

    with Client(server.grpc_url, MODEL) as connected:
        yield connected
