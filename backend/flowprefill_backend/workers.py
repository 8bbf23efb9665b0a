"""Threads that run posted jobs and may be left behind: none can hang the end of the process."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable

from flowprefill.admission import QUEUE_FULL
from flowprefill.errors import QueueFullError

Job = Callable[[], None]


class Worker:
    """One thread that runs jobs in the order in which they are posted."""

    def __init__(
        self,
        name: str,
        on_error: Callable[[Exception], None],
        max_jobs: float = math.inf,
        max_bytes: float = math.inf,
    ) -> None:
        """At most `max_jobs` jobs of `max_bytes` together wait; on_error gets what a job raises."""
        self._name = name
        self._on_error = on_error
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_jobs = 0
        self._num_bytes = 0
        self._jobs: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Job, num_bytes: int = 0) -> None:
        """Queue `job`, which holds `num_bytes`; never blocks. Raises QueueFullError."""
        with self._lock:
            if self._num_jobs >= self._max_jobs or self._num_bytes + num_bytes > self._max_bytes:
                raise QueueFullError(
                    f"{QUEUE_FULL} ({self._name}): {self._num_jobs} requests of {self._num_bytes} "
                    f"bytes wait; one more of {num_bytes} bytes is over the limit of "
                    f"{self._max_jobs} requests of {self._max_bytes} bytes"
                )
            self._num_jobs += 1
            self._num_bytes += num_bytes
            self._jobs.put((job, num_bytes))

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end. Returns False if the thread is busy at the timeout."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, num_bytes = entry
            with self._lock:
                self._num_jobs -= 1
                self._num_bytes -= num_bytes
            try:
                job()
            except Exception as error:  # a thread's edge: one job must not end the others
                with contextlib.suppress(Exception):  # nor may a log that is broken, too
                    self._on_error(error)
