"""OpenAIProcess: the endpoint as a child of the launcher. Knows its command line, nothing of HTTP
but its health.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time

from flowprefill.errors import ServerStartError
from flowprefill.server import client_host

_POLL_S = 0.05
_START_TIMEOUT_S = 60.0
_END_GRACE_S = 10.0


class OpenAIProcess:
    """start() once tritonserver is ready; drain() before it is stopped; stop() after that."""

    def __init__(self, host: str, port: int, grpc_url: str, exit_timeout_s: int) -> None:
        """host, port: where it listens. grpc_url: host:port of tritonserver's gRPC endpoint.
        exit_timeout_s: how long running answers may take at a stop."""
        self._host = client_host(host)
        self._port = port
        self._command = [
            *(sys.executable, "-m", "flowprefill.openai.server", "--launched"),
            *("--host", host, "--port", str(port), "--grpc-url", grpc_url),
            *("--exit-timeout-s", str(exit_timeout_s)),
        ]
        # It talks to tritonserver alone, which no proxy in the environment is meant to do for it.
        self._environment = os.environ | {"no_grpc_proxy": grpc_url.rpartition(":")[0]}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base URL that OpenAI's clients take."""
        return f"http://{self._host}:{self._port}/v1"

    def start(self, stopping: threading.Event) -> None:
        """Start it and wait until it answers; returns early when `stopping` gets set.

        Raises ServerStartError if it ends, or does not answer within a minute.
        """
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            # Its end of the pipe tells it when we are gone, however that came.
            stdin=subprocess.PIPE,
            # A terminal's Ctrl-C and its end are for us, and we stop it in order.
            start_new_session=True,
        )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers() and not stopping.wait(_POLL_S):
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

    def _answers(self) -> bool:
        """Whatever it says: without a model it is not ready, and may be in a minute."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=1)
        try:
            connection.request("GET", "/health")
            connection.getresponse()
            return True
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
