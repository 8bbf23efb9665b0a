"""Probes: health and metrics asked at a fixed rate, each from when it was due."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from flowprefill.bench.report import BenchmarkError

POLLS_PER_S = 20
_TIMEOUT_S = 60.0
_NONE = 0
"""Status of a probe that had no answer."""


class Probes:
    """Asks each URL POLLS_PER_S times a second inside the block of this context manager."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """urls: by the names under which take() tells their times."""
        self._times_s: dict[str, list[float]] = {name: [] for name in urls}
        self._statuses: dict[str, set[int]] = {name: set() for name in urls}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._poll, args=item) for item in urls.items()]

    def __enter__(self) -> Probes:
        self._begin_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def take(self) -> dict[str, list[float]]:
        """End, when all probes that are due by now have their answers: their times, seconds.

        Raises BenchmarkError unless all are there and are 200s.
        """
        self._end()
        least = (self._end_s - self._begin_s) * POLLS_PER_S - 2
        for name, times_s in self._times_s.items():
            if self._statuses[name] != {200} or len(times_s) < least:
                raise BenchmarkError(
                    f"{name}: {len(times_s)} answers where at least {least:.0f} were due, "
                    f"statuses {sorted(self._statuses[name])} ({_NONE}: none)"
                )
        return self._times_s

    def _end(self) -> None:
        if not self._stop.is_set():
            self._end_s = time.monotonic()
            self._stop.set()
        for thread in self._threads:
            thread.join()

    def _poll(self, name: str, url: str) -> None:
        due_s = self._begin_s
        while not (self._stop.wait(max(0.0, due_s - time.monotonic())) and due_s > self._end_s):
            status = ask(url)
            # From when it was due: a probe that is held up also delays those behind it.
            self._times_s[name].append(time.monotonic() - due_s)
            self._statuses[name].add(status)
            if status == _NONE:
                return  # each further one could take a minute
            due_s += 1 / POLLS_PER_S


def ask(url: str, body: bytes | None = None) -> int:
    """Status of a request on a connection of its own; 0 if it has none."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET" if body is None else "POST", parts.path, body)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            return _NONE
        return response.status
