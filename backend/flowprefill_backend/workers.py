"""Threads that run posted jobs and may be left behind: none can hang the end of the process."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class Workers:
    """`num_threads` threads on one queue: lowest `order` first, equals as they came.

    With one thread and equal orders this is a strictly ordered lane.
    """

    def __init__(self, name: str, num_threads: int, on_error: Callable[[Exception], None]) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Job | None]] = queue.PriorityQueue()
        self._sequence = itertools.count()
        self._on_error = on_error
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, job: Job, order: float = 0.0) -> None:
        """Queue `job`; never blocks."""
        self._jobs.put((order, next(self._sequence), job))

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end. Returns False if a thread is still busy at the timeout."""
        for _ in self._threads:
            self._jobs.put((math.inf, next(self._sequence), None))
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()[2]
            if job is None:
                return
            try:
                job()
            except Exception as error:  # a thread's edge: one job must not end the others
                self._on_error(error)
