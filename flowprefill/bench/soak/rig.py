"""SoakServer: the server under test with its OpenAI endpoint, and what its processes hold.

Processes are looked at from outside, as an operator would: /proc, /dev/shm and the metrics page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowprefill.bench.metrics_page import MetricsPage
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.servers import on_free_ports, sigterm_raises, write_model
from flowprefill.bench.soak.asking import MODEL_NAME
from flowprefill.config import EngineConfig
from flowprefill.executor.device import make_device, model_dtype
from flowprefill.openai.process import OpenAIProcess
from flowprefill.programs.model_spec import read_model_spec, resolve_model_path
from flowprefill.server import TritonServer, free_ports
from flowprefill.server_layout import SHM_DIR

MODEL = MODEL_NAME
_ROLES = {
    "flowprefill.engine_server": "engine",
    "flowprefill.openai.server": "OpenAI endpoint",
    "triton_python_backend_stub": "stub",
}
"""Part of a command line -> what the process is; tritonserver itself is known by its id."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Holdings:
    """What one process holds at one moment."""

    resident_bytes: int
    num_files: int
    """Descriptors: files, pipes, connections."""
    num_threads: int


class SoakServer:
    """A running server with one model."""

    def __init__(self, server: TritonServer, openai_port: int) -> None:
        self.server = server
        self.openai_port = openai_port
        self.stop_problems: list[str] = []
        """What its stop cut short or left behind; known when soak_server's block has ended."""

    @property
    def http_url(self) -> str:
        return f"http://{self.server.http_url}/v2/models/{MODEL}"

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.openai_port}/v1"

    def engine_pid(self) -> int:
        """Raises BenchmarkError if there is no engine process."""
        for pid, role in self._processes().items():
            if role == "engine":
                return pid
        raise BenchmarkError("the engine process is not there")

    def holdings(self) -> dict[tuple[str, int], Holdings]:
        """(Role, process id) -> what each process holds."""
        found = {}
        for pid, role in self._processes().items():
            # One that is just ending has no files any more, or no entry.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                found[(role, pid)] = holdings_of(pid)
        return found

    def shm_bytes(self) -> int:
        """What the server's files in /dev/shm take."""
        sizes = []
        for path in SHM_DIR.glob(f"{self.server.shm_prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_blocks * 512)
        return sum(sizes)

    def metrics(self) -> MetricsPage:
        """Raises OSError if nobody answers."""
        return MetricsPage.fetch(self.server.metrics_url, MODEL)

    def _processes(self) -> dict[int, str]:
        """Living processes of the server and the endpoint."""
        found = {self.server.pid: "tritonserver"}
        ours = (self.server.pid, os.getpid())
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                role = next((r for part, r in _ROLES.items() if part in command), None)
                pid = int(entry.name)
                if role and (os.getpgid(pid) == self.server.pid or _parent(entry) in ours):
                    found[pid] = role
        return found


@contextlib.contextmanager
def soak_server(config: EngineConfig) -> Iterator[SoakServer]:
    """Start it, and end it with all it left."""
    with tempfile.TemporaryDirectory(prefix="flowprefill-bench-") as directory:
        write_model(Path(directory) / MODEL, config)
        with sigterm_raises(), TritonServer(on_free_ports(Path(directory))) as server:
            (openai_port,) = free_ports(1)
            openai = OpenAIProcess("127.0.0.1", openai_port, server.grpc_url, exit_timeout_s=10)
            running = SoakServer(server, openai_port)
            try:
                openai.start(threading.Event())
                yield running
            finally:
                if not openai.stop():
                    running.stop_problems.append("the OpenAI endpoint had to be killed, or failed")
        if server.stop_problem:
            running.stop_problems.append(server.stop_problem)
        if server.left_files:
            running.stop_problems.append(f"left in /dev/shm: {', '.join(server.left_files)}")


def small_cache(config: EngineConfig) -> EngineConfig:
    """The same with a KV cache of one and a half requests of max_model_len, which must be set: so
    requests wait for blocks, and lose them."""
    assert config.max_model_len is not None
    spec = read_model_spec(resolve_model_path(config.model))
    device = make_device(config.device, config.max_slice_ms / 1000, config.num_threads)
    num_tokens = 3 * config.max_model_len // 2
    kv_bytes = num_tokens * spec.kv_bytes_per_token(model_dtype(config, device).itemsize)
    return dataclasses.replace(
        config, kv_cache_memory_fraction=None, kv_cache_memory_bytes=kv_bytes
    )


def holdings_of(pid: int) -> Holdings:
    """Raises an OSError for a process that is not there, or not ours."""
    entry = Path(f"/proc/{pid}")
    resident_pages = int((entry / "statm").read_text().split()[1])
    num_threads = int(_stat_fields(entry)[17])
    return Holdings(resident_pages * _PAGE_BYTES, len(os.listdir(entry / "fd")), num_threads)


def _parent(entry: Path) -> int:
    return int(_stat_fields(entry)[1])


def _stat_fields(entry: Path) -> list[str]:
    """Of /proc/PID/stat, from the state on: what is before it may hold blanks."""
    return (entry / "stat").read_text().rpartition(")")[2].split()
