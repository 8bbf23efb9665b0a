"""docker/haproxy/haproxy.cfg in a real HAProxy, with servers that answer health checks only."""

from __future__ import annotations

import contextlib
import csv
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flowprefill.server import free_ports
from tests.live_server import wait_for
from tests.system_tools import system_tool
from tests.unit.deploy.deploy_files import DOCKER

PORTS = {"HTTP": "/v2/health/ready", "OPENAI": "/health"}
"""What is asked on each of a server's ports."""


class Health(ThreadingHTTPServer):
    """Answers 200 or 503 to the one path that it knows, whatever `is_ready` says then; takes any
    POST."""

    is_ready = True

    def __init__(self, port: int, path: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            server: Health

            def do_GET(self) -> None:
                known = {path: 200 if self.server.is_ready else 503}
                self.send_response(known.get(self.path, 404))
                self.end_headers()

            def do_POST(self) -> None:
                self.server.posted.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.posted: list[str] = []
        super().__init__(("127.0.0.1", port), Handler)


class Proxy:
    """HAProxy, and one machine that all three of its servers are."""

    def __init__(self, http_port: int, admin_port: int, health: dict[str, Health]) -> None:
        self.http_port = http_port
        self._admin_port = admin_port
        self.health = health

    def admin(self, command: str) -> str:
        address = ("127.0.0.1", self._admin_port)
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(f"{command}\n".encode())
            with connection.makefile() as answer:
                return answer.read()

    def states(self) -> dict[str, str]:
        """Backend -> how HAProxy sees its first server: UP, DOWN, DRAIN, ..."""
        table = csv.DictReader(self.admin("show stat").lstrip("# ").splitlines())
        return {
            row["pxname"].removesuffix("_servers"): row["status"].split()[0]
            for row in table
            if row["svname"] == "server-1"
        }

    def wait_states(self, **states: str) -> None:
        wait_for(lambda: self.states() == states, what=f"{states}")


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    haproxy = system_tool("haproxy", "haproxy")
    names = [*(f"{name}_PORT" for name in (*PORTS, "GRPC")),
             *(f"{name}_BIND" for name in (*PORTS, "GRPC", "STATS", "ADMIN"))]  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    # Binds as the compose file has them, without an address.
    env = {name: f"{':' * name.endswith('BIND')}{port}" for name, port in ports.items()}
    env |= {f"SERVER_{number}": "127.0.0.1" for number in (1, 2, 3)}
    with contextlib.ExitStack() as ends:
        health = {name: Health(ports[f"{name}_PORT"], path) for name, path in PORTS.items()}
        for server in health.values():
            threading.Thread(target=server.serve_forever).start()
            ends.callback(server.server_close)
            ends.callback(server.shutdown)
        command = [haproxy, "-db", "-f", str(DOCKER / "haproxy" / "haproxy.cfg")]
        log = ends.enter_context((tmp_path / "haproxy.log").open("w"))
        process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)
        ends.callback(process.wait, 10)
        ends.callback(process.kill)
        running = Proxy(ports["HTTP_BIND"], ports["ADMIN_BIND"], health)
        wait_for(lambda: is_listening(ports["ADMIN_BIND"]), what="HAProxy's admin socket")
        running.wait_states(grpc="UP", http="UP", openai="UP")
        yield running


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_each_port_is_used_as_long_as_its_own_server_is_ready(proxy: Proxy) -> None:
    proxy.health["OPENAI"].is_ready = False
    proxy.wait_states(grpc="UP", http="UP", openai="DOWN")
    proxy.health["OPENAI"].is_ready = True
    proxy.wait_states(grpc="UP", http="UP", openai="UP")
    proxy.health["HTTP"].is_ready = False
    proxy.wait_states(grpc="DOWN", http="DOWN", openai="UP")


def test_a_server_is_taken_out_and_put_back_by_the_documented_commands(proxy: Proxy) -> None:
    for state, seen in (("drain", "DRAIN"), ("ready", "UP")):
        for backend in ("grpc_servers", "openai_servers"):
            assert proxy.admin(f"set server {backend}/server-1 state {state}").strip() == ""
        proxy.wait_states(grpc=seen, http=seen, openai=seen)


def post(proxy: Proxy, path: str, head: str, body: bytes = b"") -> int:
    """The status of a request through HAProxy, which may be answered before it is sent in full."""
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n"
    with socket.create_connection(("127.0.0.1", proxy.http_port), timeout=10) as connection:
        connection.sendall(lines.encode() + body)
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("content-length: 150000000\r\n", b"{", 413),
        ("content-length: 100000001\r\n", b"{", 413),
        ("transfer-encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n", 411),
    ],
)
def test_a_body_that_would_end_a_server_reaches_none(
    proxy: Proxy, head: str, body: bytes, status: int
) -> None:
    assert post(proxy, "/v2/models/m/generate", head, body) == status
    assert proxy.health["HTTP"].posted == []
    assert post(proxy, "/small", "content-length: 2\r\n", b"{}") == 200
    assert post(proxy, "/v2/repository/models/m/unload", "") == 200
    assert proxy.health["HTTP"].posted == ["/small", "/v2/repository/models/m/unload"]


def test_http_2_cannot_bring_a_body_of_unknown_length(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.http_port), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
