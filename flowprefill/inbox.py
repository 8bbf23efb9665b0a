"""Inbox: what other threads tell the engine thread, with the time at which they did."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from flowprefill.clock import Clock
from flowprefill.interrupt import Interrupt

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many writers, one reader. While there are messages its interrupt is raised."""

    def __init__(self, clock: Clock, interrupt: Interrupt) -> None:
        self._clock = clock
        self._interrupt = interrupt
        self._messages: list[tuple[float, T]] = []
        self._changed = threading.Condition()

    def put(self, message: T) -> None:
        """Never waits for what the reader does with earlier ones."""
        with self._changed:
            self._messages.append((self._clock.now_s(), message))
            self._interrupt.raise_now()
            self._changed.notify()

    def take(self) -> list[tuple[float, T]]:
        """All messages that are there, each with its time of arrival."""
        with self._changed:
            self._interrupt.clear()
            messages, self._messages = self._messages, []
            return messages

    def wait(self, until_s: float | None) -> list[tuple[float, T]]:
        """Sleep until there is a message or, if given, until that time; then take all."""
        timeout_s = None
        if until_s is not None:
            timeout_s = min(max(0.0, until_s - self._clock.now_s()), threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages), timeout_s)
        return self.take()
