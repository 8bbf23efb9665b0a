"""StopSignals: the first SIGINT, SIGTERM or SIGHUP asks for a stop in order, a second forces it."""

from __future__ import annotations

import os
import signal
import threading
import time

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_S = 0.5
"""What follows within it is the same wish: `timeout`, make and shells signal a process and then its
whole group."""


class StopSignals:
    """Two events that signals set."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.forced = threading.Event()
        self._stopping_s = 0.0

    def follow(self) -> None:
        """Take over the signals of this process. On the main thread only."""
        wake_end, waker = os.pipe()
        os.set_blocking(waker, False)
        # A handler runs on the main thread, which may hold an event's lock just then: handlers do
        # nothing, and a thread reads from a pipe which signals came.
        signal.set_wakeup_fd(waker)
        for signum in _SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # nohup: the end of the terminal is not to be the server's
            signal.signal(signum, lambda *_: None)
        threading.Thread(target=self._read, args=(wake_end,), name="signals", daemon=True).start()

    def note(self, signum: int, now_s: float) -> None:
        """Take one signal that came at `now_s`, monotonic seconds."""
        if signum not in _SIGNALS:
            return
        if not self.stopping.is_set():
            self._stopping_s = now_s
            self.stopping.set()
        elif now_s - self._stopping_s > _SAME_S:
            self.forced.set()

    def _read(self, wake_end: int) -> None:
        while signums := os.read(wake_end, 64):
            for signum in signums:
                self.note(signum, time.monotonic())
