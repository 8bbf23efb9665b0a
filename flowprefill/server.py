"""Starts, watches and stops one tritonserver with the FlowPrefill backend.

Knows files, processes, ports and shared memory; nothing of models or requests. Used by
`flowprefill serve`, the end-to-end tests and the benchmarks.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowprefill.errors import ServerStartError
from flowprefill.server_layout import (
    Installation,
    ServerFiles,
    find_installation,
    lay_out_backends,
)
from flowprefill.server_log import (
    EXIT_TIMEOUT_VARIABLE,
    GAVE_UP_FILE,
    HTTP_ADDRESS_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_FD_VARIABLE,
    ServerLog,
    check_log_arguments,
)
from flowprefill.thread_stacks import thread_stacks

_POLL_S = 0.05
_STACK_BYTES = 2**28
"""tritonserver 2.51 copies an HTTP body onto a thread's stack: with the usual 8 MB, a body of 6 MB
ends the server."""
UNLOAD_TIMEOUT_S = 5
"""Beyond the exit timeout: what unloading may take. Each model costs a second of waiting in
tritonserver and some tenths of ours, more on a busy machine; it may only begin at the timeout."""
_UNREADY_S = 1.0
"""For tritonserver to take its readiness back after SIGTERM: it closes its HTTP port at once."""
_KILL_GRACE_S = 5.0
"""Beyond both: what tritonserver needs to notice it, and our processes to follow it."""


@dataclass(frozen=True)
class ServerOptions:
    """How to start tritonserver."""

    model_repository: Path
    host: str = "127.0.0.1"
    """Address that HTTP, gRPC and metrics listen on; a name becomes its IPv4 address."""
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    shm_size_bytes: int = 4 * 2**20
    """First size of the /dev/shm region through which each model instance and the server talk; it
    grows by the same step."""
    exit_timeout_s: int = 10
    """Longest wait, at a stop, for requests that still run; unloading is not part of it."""
    allow_model_control: bool = False
    """Let clients load and unload models though `host` can be reached from other machines. A load
    may bring files of its own, Python code among them: it is as good as a login."""
    extra_args: tuple[str, ...] = ()
    """Passed to tritonserver as they are; none that changes its log, which is read here."""

    def __post_init__(self) -> None:
        if ":" in self.host:  # tritonserver would put the port behind it with another colon
            message = f"host={self.host!r}: must be an IPv4 address or a name"
            raise ServerStartError(message)
        try:  # tritonserver's HTTP server understands no names
            object.__setattr__(self, "host", socket.gethostbyname(self.host))
        except (OSError, UnicodeError) as error:
            message = f"host={self.host!r}: no IPv4 address of that name: {error}"
            raise ServerStartError(message) from None
        check_log_arguments(self.extra_args)

    @property
    def ports(self) -> tuple[int, int, int]:
        """Of HTTP, gRPC and metrics."""
        return self.http_port, self.grpc_port, self.metrics_port

    @property
    def has_model_control(self) -> bool:
        """Whether clients may load and unload models."""
        return self.allow_model_control or is_loopback(self.host)


class TritonServer:
    """One tritonserver process and everything it leaves behind.

    start() -> wait_ready() -> stop(). A context manager does all three. `stop` may be called at any
    time and more than once, and leaves no process, no shared memory and no temporary file.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._files: ServerFiles | None = None
        self._log = ServerLog()
        self._stop_pipe: int | None = None
        self._stop_problem: str | None = None
        self._left_files: list[str] = []

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """host:port of the HTTP endpoint, as tritonclient takes it."""
        return f"{client_host(self.options.host)}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC endpoint, as tritonclient takes it."""
        return f"{client_host(self.options.host)}:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The whole URL of the Prometheus page."""
        return f"http://{client_host(self.options.host)}:{self.options.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process id of tritonserver, and id of the process group of all its children."""
        assert self._process is not None, "start() was not called"
        return self._process.pid

    @property
    def shm_prefix(self) -> str:
        """What the names of this server's files in /dev/shm start with."""
        assert self._files is not None, "start() was not called"
        return self._files.prefix

    @property
    def log(self) -> ServerLog:
        """What tritonserver and the backend wrote."""
        return self._log

    @property
    def has_failed_engine(self) -> bool:
        """A model's engine was given up: the model answers errors alone from now on."""
        return self._files is not None and (self._files.run_dir / GAVE_UP_FILE).exists()

    @property
    def stop_problem(self) -> str | None:
        """What the last stop() cut short or left undone, in words; None if nothing."""
        return self._stop_problem

    @property
    def left_files(self) -> list[str]:
        """Names in /dev/shm that the last stop() removed in place of the server's processes."""
        return self._left_files

    def start(self) -> None:
        """Start tritonserver; returns at once. Raises ServerStartError, in one line."""
        assert self._process is None, "already started"
        if not self.options.model_repository.is_dir():
            raise ServerStartError(f"no model repository at {self.options.model_repository}")
        installation = find_installation()
        check_ports(self.options.host, *self.options.ports)
        self._files = files = ServerFiles()
        backends = lay_out_backends(installation, files.run_dir / "backends")
        stop_fd, self._stop_pipe = os.pipe()
        stop_variables = {
            STOP_FD_VARIABLE: str(stop_fd),
            EXIT_TIMEOUT_VARIABLE: str(self.options.exit_timeout_s),
            HTTP_ADDRESS_VARIABLE: self.http_url,
            RUN_DIR_VARIABLE: str(files.run_dir),
        }
        try:
            with thread_stacks(_STACK_BYTES):
                self._process = subprocess.Popen(
                    [str(installation.binary), *self._arguments(backends)],
                    cwd=files.run_dir,  # the stub imports `model` from the working directory first
                    env=_environment(installation) | stop_variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # A terminal's Ctrl-C reaches only us, and we stop the children in order.
                    start_new_session=True,
                    pass_fds=(files.fd, stop_fd),
                )
        finally:
            os.close(stop_fd)
        assert self._process.stdout is not None
        self._log.follow(self._process.stdout)

    def is_alive(self) -> bool:
        """True while tritonserver runs; it may not be ready."""
        return self._process is not None and self._process.poll() is None

    def is_ready(self) -> bool:
        """True when the server answers that all its models can be used."""
        return self._ask("GET", "/v2/health/ready") is not None

    def model_to_try(self) -> str | None:
        """A loaded model: the first decoupled one, else the first; None without any."""
        index = self._ask("POST", "/v2/repository/index", '{"ready": true}')
        names = sorted(model["name"] for model in json.loads(index or "[]"))
        return next(filter(self._is_decoupled, names), names[0] if names else None)

    def _is_decoupled(self, model: str) -> bool:
        config = json.loads(self._ask("GET", f"/v2/models/{model}/config") or "{}")
        return bool(config.get("model_transaction_policy", {}).get("decoupled"))

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes | None:
        """What the server answers with success over HTTP; None without such an answer."""
        port = self.options.http_port
        connection = http.client.HTTPConnection(client_host(self.options.host), port, timeout=5)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_ready(
        self,
        timeout_s: float = 600.0,
        on_line: Callable[[str], None] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """Wait until all models are loaded; `on_line` gets what is logged meanwhile, line by line.

        Returns early, not ready, when `stopping` gets set. Raises ServerStartError with the
        server's own reason if it gives up, or after `timeout_s`.
        """
        stopping = stopping or threading.Event()
        deadline_s = time.monotonic() + timeout_s
        while not stopping.wait(_POLL_S):
            alive = self.is_alive()
            for line in self._log.new_lines():
                if on_line:
                    on_line(line)
            if not alive:
                self._log.finish()
                raise ServerStartError(self._log.failure_reason())
            if self.is_ready():
                return
            if time.monotonic() > deadline_s:
                raise ServerStartError(f"not ready after {timeout_s:g} s")

    def stop(self, forced: threading.Event | None = None) -> bool:
        """Let running requests finish within the exit timeout, then end all processes.

        The server is not ready from the start. Then models of this backend refuse new requests, and
        at the timeout end those that still run; both are answered UNAVAILABLE. Once `forced` is set
        nothing is waited for: all processes are killed. Returns True if there was a server and
        nothing was cut short.
        """
        forced = forced or threading.Event()
        is_clean = False
        if self._process is not None:
            if self.is_alive():
                self._end_in_order(forced)
            code = self._process.poll()
            # Stubs and engines end by themselves after tritonserver; those that hang are killed.
            if code is not None:
                _wait_until(lambda: forced.is_set() or not _group_exists(self.pid), _KILL_GRACE_S)
            _kill_group(self.pid)
            self._process.wait()
            self._log.finish()
            if code is not None:
                self._stop_problem = self._log.stop_problem(code)
            elif forced.is_set():
                self._stop_problem = "a second signal forced the stop"
            else:
                self._stop_problem = "tritonserver had to be killed"
            is_clean = self._stop_problem is None
        if self._stop_pipe is not None:
            os.close(self._stop_pipe)
        if self._files is not None:
            self._left_files = self._files.release()
        self._process = self._files = self._stop_pipe = None
        return is_clean

    def _end_in_order(self, forced: threading.Event) -> None:
        """Tell tritonserver and the backend to stop; wait as long as that may take."""
        assert self._process is not None and self._stop_pipe is not None
        self._process.send_signal(signal.SIGTERM)
        # Readiness goes off first, so that nobody who asked for it is sent here and refused.
        _wait_until(lambda: forced.is_set() or not self.is_ready(), _UNREADY_S)
        # Never read: all instances see that it can be. It does not only end, for that would also be
        # the end of a launcher that was killed, which is no reason to serve no more.
        with contextlib.suppress(BrokenPipeError):  # tritonserver has just died
            os.write(self._stop_pipe, b"stop")
        limit_s = self.options.exit_timeout_s + UNLOAD_TIMEOUT_S + _KILL_GRACE_S
        _wait_until(lambda: forced.is_set() or not self.is_alive(), limit_s)

    def _arguments(self, backends: Path) -> list[str]:
        o, size = self.options, self.options.shm_size_bytes
        assert self._files is not None
        arguments = [
            f"--model-repository={o.model_repository.resolve()}",
            f"--backend-directory={backends}",
            f"--http-address={o.host}",
            f"--http-port={o.http_port}",
            f"--grpc-address={o.host}",
            f"--grpc-port={o.grpc_port}",
            f"--metrics-address={o.host}",
            f"--metrics-port={o.metrics_port}",
            f"--exit-timeout-secs={o.exit_timeout_s + UNLOAD_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={self._files.prefix}",
            f"--backend-config=python,shm-default-byte-size={size}",
            f"--backend-config=python,shm-growth-byte-size={size}",
        ]
        # Either way, what the repository holds at the start is loaded.
        if o.has_model_control:
            arguments += ["--model-control-mode=explicit", "--load-model=*"]
        else:
            arguments += ["--model-control-mode=none"]
        if not Path("/dev/nvidiactl").exists():
            arguments.append("--allow-gpu-metrics=false")
        return [*arguments, *o.extra_args]


def client_host(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`; False if that is not sure."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_ports(host: str, *ports: int) -> None:
    """Raise ServerStartError naming the first on which nothing can listen, or that comes twice."""
    with contextlib.ExitStack() as held:
        for index, port in enumerate(ports):
            if port and port in ports[:index]:
                raise ServerStartError(f"port {port} on {host}: asked for twice")
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                reason = os.strerror(error.errno or 0).lower()
                raise ServerStartError(f"port {port} on {host}: {reason}") from None


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens now; held together until the last is found, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def _environment(installation: Installation) -> dict[str, str]:
    """The stub embeds Python: the first python on PATH decides whose packages it sees."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    libraries = [str(directory) for directory in installation.library_dirs]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*libraries, env.get("LD_LIBRARY_PATH")]))
    env.pop("PYTHONHOME", None)
    return env


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
