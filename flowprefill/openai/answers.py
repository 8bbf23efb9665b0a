"""Answers: the streams of one HTTP request, merged.

Each stream is read by a task of its own, always to its end: tritonserver 2.51 holds a model whose
stream is dropped between the last response and the end. So leaving cancels the call, not the task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill_client import AsyncStream, Completion, Delta, ServerError

_log = logging.getLogger("flowprefill.openai")


@dataclass(frozen=True)
class Part:
    """New text of one choice."""

    index: int
    delta: Delta


class Answers:
    """Parts of all choices in the order in which they come.

    An async context manager: leaving it cancels what has not ended.
    """

    def __init__(self, streams: Sequence[AsyncStream], tasks: set[asyncio.Task[None]]) -> None:
        """tasks: the readers that still run, of all requests; kept so that none is forgotten."""
        self._streams = streams
        self._num_open = len(streams)
        self._events: deque[Part | ServerError] = deque()
        self._arrived = asyncio.Event()
        for index, stream in enumerate(streams):
            task = asyncio.create_task(self._read(index, stream))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    @property
    def is_complete(self) -> bool:
        """The last part of each choice has been taken."""
        return self._num_open == 0

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to take. False if not within `timeout_s`."""
        if not self._events:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
            except asyncio.TimeoutError:
                return False
        return True

    def take(self) -> Part:
        """What came first, after wait(). Raises ServerError if it is a failure."""
        event = self._events.popleft()
        if isinstance(event, ServerError):
            raise event
        if event.delta.finish_reason is not None:
            self._num_open -= 1
        return event

    async def read_all(self) -> None:
        """Until all are complete. Raises ServerError at the first failure."""
        while not self.is_complete:
            await self.wait(None)
            self.take()

    def raise_failure(self) -> None:
        """Raise ServerError if a failure would be taken next."""
        if self._events and isinstance(self._events[0], ServerError):
            raise self._events[0]

    def completions(self) -> list[Completion]:
        """What was received of each choice."""
        return [stream.completion() for stream in self._streams]

    def fail(self, error: ServerError) -> None:
        """End with `error` what has not ended."""
        self.cancel()
        self._put(error)

    def cancel(self) -> None:
        """Tell the server to drop what has not ended."""
        for stream in self._streams:
            stream.cancel()

    async def _read(self, index: int, stream: AsyncStream) -> None:
        try:
            async for delta in stream:
                self._put(Part(index, delta))
        except ServerError as error:
            self._put(error)
        except Exception as error:  # a bug of ours: whoever waits for this answer must hear of it
            _log.exception("an answer cannot be read")
            self._put(ServerError(f"unexpected {type(error).__name__}: {error}", "INTERNAL"))

    def _put(self, event: Part | ServerError) -> None:
        self._events.append(event)
        self._arrived.set()
