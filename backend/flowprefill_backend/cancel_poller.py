"""Finds clients that have gone: the server has no callback for it, so one thread asks.

A departure is found within max(cancel_poll_ms, live requests / MAX_POLLS_PER_S), and a round trip.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from flowprefill_backend.live import LiveRequest

MAX_POLLS_PER_S = 2000
"""One poll costs the server's only service thread about 24 us, so this is 5% of it at most."""


class CancelPoller:
    """Asks each watched request once per interval, in rotation; sleeps while there are none."""

    def __init__(
        self,
        interval_s: float,
        on_gone: Callable[[LiveRequest], object],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._interval_s = interval_s
        self._on_gone = on_gone
        self._on_error = on_error
        self._watched: deque[LiveRequest] = deque()
        self._failing: set[LiveRequest] = set()
        """Those of them for which an error was told: once is enough."""
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="cancel-poller", daemon=True)
        self._thread.start()

    def watch(self, live: LiveRequest) -> None:
        """Poll `live` until it is over."""
        with self._changed:
            self._watched.append(live)
            if len(self._watched) == 1:
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._watched)
                # A request that ends within the interval is never asked about.
                self._changed.wait_for(lambda: self._is_closing, self._interval_s)
                if self._is_closing:
                    return
            self._poll_round()

    def _poll_round(self) -> None:
        polls_left = max(1, int(MAX_POLLS_PER_S * self._interval_s))
        for _ in range(len(self._watched)):
            live = self._watched.popleft()
            if live.is_over or self._has_gone(live):
                self._failing.discard(live)
                continue
            self._watched.append(live)
            polls_left -= 1
            if polls_left == 0:
                return

    def _has_gone(self, live: LiveRequest) -> bool:
        """Ask, and end what nobody waits for. A question that fails is put again in its turn."""
        try:
            if live.is_client_gone():
                self._on_gone(live)
                return True
        except Exception as error:  # the thread's edge: the others must still be asked
            if live not in self._failing:
                self._failing.add(live)
                with contextlib.suppress(Exception):  # even if the log is broken, too
                    self._on_error(error)
        return False
