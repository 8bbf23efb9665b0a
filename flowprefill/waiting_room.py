"""WaitingRoom: Admission for several threads, and a clock that ends waiting on time.

The engine thread can be inside a prefill that nobody may interrupt, so waiting ends on a thread of
its own. It sleeps until somebody's time is up, and without a limit while nobody waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowprefill.admission import Admission
from flowprefill.clock import Clock


class WaitingRoom:
    """Who waits for a start. Of two who end a request, only one gets it: see Admission."""

    def __init__(
        self, admission: Admission, clock: Clock, on_timeout: Callable[[int], None]
    ) -> None:
        """on_timeout(req_id): called on the room's thread or a caller's, under the room's lock, so
        that whoever finds a request gone finds what on_timeout did as well; must return at once and
        not call back."""
        self._admission = admission
        self._clock = clock
        self._on_timeout = on_timeout
        self._changed = threading.Condition()
        self._wakes_s: float | None = None  # when the thread wakes; None = not by itself
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="queue-timeout", daemon=True)
        self._thread.start()

    def admit(self, req_id: int, num_tokens: int, arrival_s: float, prefill_s: float) -> None:
        """As Admission.admit. Raises QueueFullError."""
        with self._changed:
            self._admission.admit(req_id, num_tokens, arrival_s, prefill_s)
            timeout_s = self._admission.next_timeout_s()
            if timeout_s is not None and (self._wakes_s is None or timeout_s < self._wakes_s):
                self._changed.notify()

    def leave(self, req_id: int) -> bool:
        """As Admission.leave; whose time is up has been timed out."""
        with self._changed:
            self._expire()
            return self._admission.leave(req_id)

    def __contains__(self, req_id: int) -> bool:
        """Whether the request waits."""
        with self._changed:
            return req_id in self._admission

    @property
    def waiting_prefill_s(self) -> float:
        """As Admission.waiting_prefill_s; may be asked within on_timeout."""
        with self._changed:
            return self._admission.waiting_prefill_s

    def close(self) -> None:
        """Nobody is timed out any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._expire()
                self._wakes_s = self._admission.next_timeout_s()
                wait_s = None
                if self._wakes_s is not None:
                    left_s = max(0.0, self._wakes_s - self._clock.now_s())
                    wait_s = min(left_s, threading.TIMEOUT_MAX)
                self._changed.wait(wait_s)

    def _expire(self) -> None:
        for req_id in self._admission.expire(self._clock.now_s()):
            self._on_timeout(req_id)
