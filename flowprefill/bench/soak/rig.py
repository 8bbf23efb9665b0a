"""SoakServer: the server under test with its OpenAI endpoint, and what its processes hold.

Processes are looked at from outside, as an operator would: /proc, /dev/shm and the metrics page.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.servers import on_free_ports, sigterm_raises, write_model
from flowprefill.bench.soak.asking import MODEL_NAME
from flowprefill.config import EngineConfig
from flowprefill.openai.process import OpenAIProcess
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


class SoakServer:
    """A running server with one model."""

    def __init__(self, server: TritonServer, openai_port: int) -> None:
        self.server = server
        self.openai_port = openai_port

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

    def resident_bytes(self) -> dict[tuple[str, int], int]:
        """(Role, process id) -> resident memory of each process."""
        found = {}
        for pid, role in self._processes().items():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{pid}/statm").read_text().split()
                found[(role, pid)] = int(fields[1]) * _PAGE_BYTES
        return found

    def shm_bytes(self) -> int:
        """What the server's files in /dev/shm take."""
        sizes = []
        for path in SHM_DIR.glob(f"{self.server.shm_prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_blocks * 512)
        return sum(sizes)

    def metrics(self) -> dict[str, float]:
        """Families of the model on the metrics page, summed over their labels."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=10) as reply:
            text = reply.read().decode()
        sums: dict[str, float] = {}
        for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            if f'model="{MODEL}"' in labels:
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

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
    """Start it, and end it with all it left. Raises BenchmarkError for files left in /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="flowprefill-bench-") as directory:
        write_model(Path(directory) / MODEL, config, config.policy)
        with sigterm_raises(), TritonServer(on_free_ports(Path(directory))) as server:
            prefix = server.shm_prefix
            (openai_port,) = free_ports(1)
            openai = OpenAIProcess("127.0.0.1", openai_port, server.grpc_url, exit_timeout_s=10)
            try:
                openai.start(threading.Event())
                yield SoakServer(server, openai_port)
            finally:
                openai.stop()
        left = [path.name for path in SHM_DIR.glob(f"{prefix}*")]
        if left:
            raise BenchmarkError(f"left in /dev/shm: {', '.join(left)}")


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
