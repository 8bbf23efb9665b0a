"""A peer as a process: start it, ask it for one measurement at a time, end it.

It is stopped (SIGSTOP) while nobody asks: threads that spin in between would disturb the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowprefill.bench.peers.spec import Conditions, PeerSpec
from flowprefill.bench.report import BenchmarkError

_WORKER = Path(__file__).with_name("worker.py")
_LOAD_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 10.0
_NUM_LOG_LINES = 5


class Peer:
    """One running peer."""

    def __init__(self, spec: PeerSpec, conditions: Conditions) -> None:
        """Start it and wait until it is ready. Raises BenchmarkError with its last words."""
        self.name = spec.name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        settings = {
            **dataclasses.asdict(conditions),
            "worker": spec.worker,
            "model": str(spec.model),
            "options": dict(spec.options),
        }
        threads = str(conditions.num_threads)
        command = [str(spec.python), "-I", str(_WORKER), json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
        )
        try:
            self.version: str = self._answer(_LOAD_TIMEOUT_S)["version"]
        except BaseException:
            self._process.kill()
            self.close()
            raise
        # From here on it is the head of a process group of its own (worker.py).
        self._signal(signal.SIGSTOP)

    def prefill_s(self, num_tokens: int, seed: int) -> float:
        """Seconds from a prompt drawn from `seed` to its first token."""
        return self._ask({"num_tokens": num_tokens, "seed": seed})

    def decode_s(self, num_tokens: int, decode: int, seed: int) -> float:
        """Seconds of `decode` tokens behind the first one of a prompt of num_tokens."""
        return self._ask({"num_tokens": num_tokens, "seed": seed, "decode": decode})

    def close(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, request: dict[str, int]) -> float:
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._error("has died") from None
        seconds = self._answer(_ANSWER_TIMEOUT_S)["seconds"]
        self._signal(signal.SIGSTOP)
        return float(seconds)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next line, which it writes in one piece."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise self._error(f"is silent for {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._error("has died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, signum: int) -> None:
        os.killpg(self._process.pid, signum)

    def _error(self, problem: str) -> BenchmarkError:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_NUM_LOG_LINES:]
        return BenchmarkError("\n".join([f"peer {self.name} {problem}; its last lines:", *lines]))


@contextlib.contextmanager
def start_peers(specs: Sequence[PeerSpec], conditions: Conditions) -> Iterator[list[Peer]]:
    """Start all, one after the other; they end behind the block."""
    peers: list[Peer] = []
    try:
        for spec in specs:
            peers.append(Peer(spec, conditions))
        yield peers
    finally:
        for peer in peers:
            peer.close()


def describe_peers(conditions: Conditions, peers: Sequence[Peer]) -> dict[str, Any]:
    """What ran beside our engine, and how: for the facts of the run."""
    return {
        "dtype": conditions.dtype,
        "num_threads": conditions.num_threads,
        "peers": {peer.name: peer.version for peer in peers},
    }
