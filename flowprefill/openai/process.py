"""OpenAIProcess: the endpoint as a child of the launcher. Knows its command line, nothing of HTTP
but its health.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time

from flowprefill.errors import ServerStartError

_POLL_S = 0.05
_START_TIMEOUT_S = 60.0
_END_GRACE_S = 10.0


class OpenAIProcess:
    """start() once tritonserver is ready; drain() before it is stopped; stop() after that."""

    def __init__(self, host: str, port: int, grpc_url: str, exit_timeout_s: int) -> None:
        """host, port: where it listens. grpc_url: host:port of tritonserver's gRPC endpoint.
        exit_timeout_s: how long running answers may take at a stop."""
        self._host = "127.0.0.1" if host in ("0.0.0.0", "") else host
        self._port = port
        self._command = [
            *(sys.executable, "-m", "flowprefill.openai.server", "--launched"),
            *("--host", host, "--port", str(port), "--grpc-url", grpc_url),
            *("--exit-timeout-s", str(exit_timeout_s)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base URL that OpenAI's clients take."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def start(self, stopping: threading.Event) -> None:
        """Start it and wait until it is ready; returns early when `stopping` gets set.

        Raises ServerStartError if it ends, or is not ready within a minute.
        """
        # Its end of the pipe tells it when we are gone, however that came.
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready() and not stopping.wait(_POLL_S):
            if not self.is_alive() or time.monotonic() > deadline_s:
                self.stop()
                raise ServerStartError("the OpenAI endpoint did not start; see the lines above")

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def drain(self) -> None:
        """From now on new requests are refused; it ends by itself with the running ones."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self, forced: threading.Event | None = None) -> bool:
        """Wait for its end, some seconds at most, and not at all once `forced` is set.

        Then it is killed. Returns whether it ended by itself, in order.
        """
        if self._process is None:
            return True
        self.drain()
        deadline_s = time.monotonic() + _END_GRACE_S
        while self.is_alive() and time.monotonic() < deadline_s:
            if forced is not None and forced.is_set():
                break
            time.sleep(_POLL_S)
        is_in_order = self._process.poll() == 0
        self._process.kill()  # Popen never signals a pid that was reaped
        self._process.wait()
        return is_in_order

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
