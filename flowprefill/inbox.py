"""Inbox: what other threads tell the engine thread, with the time at which they did."""

from __future__ import annotations

import queue
import threading
from typing import Generic, TypeVar

from flowprefill.clock import Clock

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many writers, one reader. Testing it between two slices costs one call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[float, T]] = queue.SimpleQueue()

    def put(self, message: T) -> None:
        """Never blocks."""
        self._queue.put((self._clock.now_s(), message))

    def has_messages(self) -> bool:
        return not self._queue.empty()

    def take(self) -> list[tuple[float, T]]:
        """All messages that are there, each with its time of arrival."""
        messages = []
        try:
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages

    def wait(self, until_s: float | None) -> list[tuple[float, T]]:
        """Sleep until there is a message or, if given, until that time; then take all."""
        timeout_s = None
        if until_s is not None:
            timeout_s = min(max(0.0, until_s - self._clock.now_s()), threading.TIMEOUT_MAX)
        try:
            first = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [first, *self.take()]
