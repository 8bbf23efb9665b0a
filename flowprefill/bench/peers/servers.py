"""Peers as servers of OpenAI's /v1/completions: started, waited for, and ended.

For `flowprefill bench servers`. What vLLM or OpenVINO need on the command line is known here alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from flowprefill.bench.peers.spec import Conditions, PeerSpec
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.servers import sigterm_raises
from flowprefill.server import free_ports

MODEL_NAME = "peer"
"""Under which the model is served."""
_OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 30.0
_POLL_S = 0.2
_NUM_LOG_LINES = 5


@dataclass(frozen=True)
class PeerServer:
    """One that answers."""

    url: str
    """http://host:port"""
    version: str
    process_group: int

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """None of its processes runs meanwhile (SIGSTOP)."""
        os.killpg(self.process_group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process_group, signal.SIGCONT)


@contextlib.contextmanager
def serve_peer(spec: PeerSpec, conditions: Conditions) -> Iterator[PeerServer]:
    """Start it and wait until it answers; it ends behind the block, with all that it has started.

    Raises BenchmarkError with its last words if it does not come up.
    """
    (port,) = free_ports(1)
    command = command_line(spec, conditions, port)
    with sigterm_raises(), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment(conditions)},
            start_new_session=True,
        )
        try:
            version = _wait_ready(spec.name, process, port, log)
            url = f"http://127.0.0.1:{port}"
            yield PeerServer(url, f"{spec.worker} {version}", process.pid)
        finally:
            _end(process)


def sends_priority(spec: PeerSpec) -> bool:
    """Whether it serves by the priority that a request brings."""
    return spec.options.get("scheduling_policy") == "priority"


def command_line(spec: PeerSpec, conditions: Conditions, port: int) -> list[str]:
    """Raises BenchmarkError for a worker that has no server."""
    if spec.worker == "vllm":
        options = {
            "model": spec.model,
            "served_model_name": MODEL_NAME,
            "host": "127.0.0.1",
            "port": port,
            "dtype": conditions.dtype,
            "max_model_len": conditions.max_model_len,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "disable_uvicorn_access_log": True,
            **spec.options,
        }
        module = "vllm.entrypoints.openai.api_server"
        return [str(spec.python), "-I", "-m", module, *flags(options)]
    if spec.worker == "openvino":
        settings = {
            **asdict(conditions),
            "model": str(spec.model),
            "options": dict(spec.options),
            "port": port,
        }
        return [str(spec.python), "-I", str(_OPENVINO_SERVER), json.dumps(settings)]
    raise BenchmarkError(f"peer {spec.name}: {spec.worker} has no server; openvino and vllm have")


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as vLLM takes them: --max-model-len 8192, --disable-log-stats, --no-..."""
    found = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", str(value)]
    return found


def environment(conditions: Conditions) -> dict[str, str]:
    """Variables that keep a peer to its processors, and from the network."""
    cpus = sorted(os.sched_getaffinity(0))[: conditions.num_threads]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(conditions.num_threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _wait_ready(name: str, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> str:
    """Its version, once it tells it."""
    until_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise BenchmarkError(f"peer {name} has ended; its last lines:\n{_last_lines(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            url = f"http://127.0.0.1:{port}/version"
            with urllib.request.urlopen(url, timeout=_START_TIMEOUT_S) as response:
                return str(json.load(response)["version"])
        time.sleep(_POLL_S)
    raise BenchmarkError(
        f"peer {name} did not answer in {_START_TIMEOUT_S:.0f} s; its last lines:\n"
        f"{_last_lines(log)}"
    )


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_NUM_LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has started and left
    process.wait()
