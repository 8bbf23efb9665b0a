"""Sends a plan to a target: open loop, each request at its own time, whatever the server does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from flowprefill.replay.errors import TargetError
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.records import ReplayRecord
from flowprefill.replay.targets import Message, Part, Target

_LEAD_S = 0.05
"""Time before the first request, and before one that comes after idle time that was cut."""


@dataclass
class _Answer:
    """An answer in the making."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    num_input_tokens: int | None = None
    server_ttft_s: float | None = None

    def add(self, part: Part, now_s: float) -> None:
        """Take what came at `now_s`; the server's own count of tokens is believed."""
        if part.num_input_tokens is not None:
            self.num_input_tokens = part.num_input_tokens
        if part.server_ttft_s is not None:
            self.server_ttft_s = part.server_ttft_s
        num_tokens = len(self.token_s) + part.num_tokens
        if part.total_tokens is not None:
            num_tokens = part.total_tokens
        del self.token_s[num_tokens:]
        self.token_s += [now_s] * (num_tokens - len(self.token_s))


class Replayer(Generic[Message]):
    """One replay. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        target: Target[Message],
        timeout_s: float,
        on_change: Callable[[], None] = lambda: None,
        cut_idle: bool = False,
    ) -> None:
        """timeout_s: a request without its end for so long has failed.

        on_change: called when a request is sent or ends
        cut_idle: while no request runs, go straight to the next one. An idle server changes
            nothing, so TTFTs are those of the whole trace in less time.
        """
        self._target = target
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._cut_idle = cut_idle
        self._loop = asyncio.get_running_loop()
        self._origin_s = 0.0
        self._sending: asyncio.Task[object] | None = None
        self.num_sent = 0
        self.records: list[ReplayRecord] = []
        """Of what has ended, in that order."""
        self.is_stopped = False

    async def run(
        self, plan: Sequence[PlannedRequest], messages: Iterable[Message]
    ) -> list[ReplayRecord]:
        """Send all and wait for all answers, or until stop(); records in the order of the plan.

        messages: what target.prepare made of each
        """
        if self.is_stopped:
            return []
        self._sending = asyncio.current_task()
        tasks: list[asyncio.Task[None]] = []
        # What there is lives to the end: a collection that goes through all prompts takes longer
        # than a request may be late.
        gc.collect()
        gc.freeze()
        self._origin_s = self._loop.time() + _LEAD_S
        try:
            for planned, message in zip(plan, messages, strict=True):
                await self._wait_until(planned.due_s, tasks)
                tasks.append(asyncio.create_task(self._send(planned, message)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            gc.unfreeze()
        return sorted(self.records, key=lambda record: record.planned.req_id)

    def stop(self) -> None:
        """Send nothing more, cancel what runs; run() returns the records of what had ended."""
        self.is_stopped = True
        if self._sending:
            self._sending.cancel()

    async def _wait_until(self, due_s: float, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for that second of the plan, or bring it nearer once nothing runs."""
        if self._cut_idle:
            running = [task for task in tasks if not task.done()]
            if running:
                await asyncio.wait(running, timeout=max(0.0, due_s - self._now_s()))
            self._origin_s -= max(0.0, due_s - self._now_s() - _LEAD_S)
        # Also what is overdue gives way once, so that it is really sent.
        await asyncio.sleep(max(0.0, due_s - self._now_s()))

    def _now_s(self) -> float:
        return self._loop.time() - self._origin_s

    async def _send(self, planned: PlannedRequest, message: Message) -> None:
        self.num_sent += 1
        self._on_change()
        answer = _Answer(self._now_s())
        error = None
        try:
            await asyncio.wait_for(self._receive(message, answer), self._timeout_s)
        except asyncio.TimeoutError:
            error = f"TIMEOUT: no end within {self._timeout_s:g} s"
        except TargetError as failure:
            error = str(failure)
        self.records.append(
            ReplayRecord(
                planned,
                answer.sent_s,
                tuple(answer.token_s),
                error,
                self._now_s(),
                answer.num_input_tokens,
                answer.server_ttft_s,
            )
        )
        self._on_change()

    async def _receive(self, message: Message, answer: _Answer) -> None:
        answer.sent_s = self._now_s()  # wait_for may have let others go first
        async for part in self._target.send(message):
            answer.add(part, self._now_s())
