"""OpenAIProcess: the endpoint as a child of the launcher, started again if it dies or hangs.

Knows its command line, nothing of HTTP but its health.
"""

from __future__ import annotations

import http.client
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from flowprefill.errors import ServerStartError
from flowprefill.server import client_host
from flowprefill.supervision import RestartPlan, Supervision

_POLL_S = 0.05
_START_TIMEOUT_S = 60.0
_END_GRACE_S = 10.0
_ANSWER_S = 1.0
_MAX_SILENCES = 6
"""So often in a row without an answer: it hangs. Counted, for a launcher that stood still itself
(a suspended machine) has seen no silence."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class OpenAIProcess:
    """start() once tritonserver is ready; tend() from then on; drain() before tritonserver is
    stopped; stop() after that. For one thread."""

    def __init__(
        self,
        host: str,
        port: int,
        grpc_url: str,
        exit_timeout_s: int,
        *,
        ask_s: float = 5.0,
        supervision: Supervision | None = None,
        say: Callable[[str], None] = _say,
    ) -> None:
        """host, port: where it listens. grpc_url: host:port of tritonserver's gRPC endpoint.
        exit_timeout_s: how long running answers may take at a stop.
        ask_s: between two questions for its health. supervision: the limits of its restarts.
        say: is told of them."""
        self._host = client_host(host)
        self._port = port
        self._command = [
            *(sys.executable, "-m", "flowprefill.openai.server", "--launched"),
            *("--host", host, "--port", str(port), "--grpc-url", grpc_url),
            *("--exit-timeout-s", str(exit_timeout_s)),
        ]
        # It talks to tritonserver alone, which no proxy in the environment is meant to do for it.
        self._environment = os.environ | {"no_grpc_proxy": grpc_url.rpartition(":")[0]}
        self._ask_s, self._answer_s = ask_s, min(ask_s, _ANSWER_S)
        self._restarts = RestartPlan(supervision or Supervision())
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._respawn_s = math.inf  # it is down until then
        self._next_ask_s = 0.0
        self._silences_left = 0
        self._has_answered = False  # since it was started last

    @property
    def url(self) -> str:
        """The base URL that OpenAI's clients take."""
        return f"http://{self._host}:{self._port}/v1"

    def start(self, stopping: threading.Event) -> None:
        """Start it and wait until it answers; returns early when `stopping` gets set.

        Raises ServerStartError if it ends, or does not answer within a minute.
        """
        self._spawn()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers() and not stopping.wait(_POLL_S):
            if not self.is_alive() or time.monotonic() > deadline_s:
                self.stop()
                raise ServerStartError("the OpenAI endpoint did not start; see the lines above")

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tend(self) -> bool:
        """Start it again, in its place, if it has died or hangs; to be called all the time.

        It has no state: what is lost is the answers that it was giving. Waits a second at most.
        Returns False once it has died too often; then it is not started any more.
        """
        now_s = time.monotonic()
        if self._process is None:
            return now_s < self._respawn_s or self._respawn()
        code = self._process.poll()
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return self._on_death(how)
        if now_s >= self._next_ask_s:
            self._ask()
            self._next_ask_s = time.monotonic() + self._ask_s
        if self._silences_left == 0:
            return self._on_death("does not answer")
        return True

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

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            # Its end of the pipe tells it when we are gone, however that came.
            stdin=subprocess.PIPE,
            # A terminal's Ctrl-C and its end are for us, and we stop it in order.
            start_new_session=True,
        )
        self._has_answered = False
        self._silences_left = max(_MAX_SILENCES, int(_START_TIMEOUT_S / self._ask_s))

    def _respawn(self) -> bool:
        try:
            self._spawn()
        except OSError as error:  # no memory, for one
            return self._on_death(f"cannot be started: {error}")
        return True

    def _ask(self) -> None:
        if not self._answers():
            self._silences_left -= 1
            return
        self._silences_left = _MAX_SILENCES
        if not self._has_answered:
            self._has_answered = True
            self._restarts.note_ready(time.monotonic())

    def _on_death(self, how: str) -> bool:
        """End what is left of it, and plan its restart. False: there is none any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.drain()
        self._process, self._respawn_s = None, math.inf
        now_s = time.monotonic()
        backoff_s = self._restarts.backoff_after_death_s(now_s)
        if backoff_s is None:
            self._say(f"error: the OpenAI endpoint {how}")
            return False
        self._say(f"warning: the OpenAI endpoint {how}; it is started again in {backoff_s:g} s")
        self._respawn_s = now_s + backoff_s
        return True

    def _answers(self) -> bool:
        """Whatever it says: without a model it is not ready, and may be in a minute."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._answer_s)
        try:
            connection.request("GET", "/health")
            connection.getresponse()
            return True
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
