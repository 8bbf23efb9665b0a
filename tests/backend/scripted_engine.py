"""An engine that says what a test tells it to, on the thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flowprefill.engine_process import EngineState
from flowprefill.errors import FlowPrefillError, UnavailableError
from flowprefill.request import FinishReason, Logprob, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats

WAIT_S = 10.0


class ScriptedEngine:
    def __init__(self, on_output: Callable[[TokenOutput], None], vocab_size: int) -> None:
        self.state = EngineState.READY
        self.num_restarts = 0
        self.now = EngineStats(num_decoding=3)
        self.num_asked = 0
        self.is_closed = False
        self.is_recording = False
        self.recorded: list[Any] = []
        """Runs, as on the wire, that a timeline has next."""
        self.is_full = False
        self.submit_error: FlowPrefillError | None = None
        self.cancelled: list[int] = []
        self._on_output = on_output
        self._info = EngineInfo(
            "tiny", "cpu", "float32", 100, vocab_size, [1], 10, 16, "torch", True
        )
        self._submitted: dict[int, Request] = {}
        self._changed = threading.Condition()

    def start(self, on_progress: Callable[[str, float], None]) -> EngineInfo:
        for percent in range(101):
            on_progress("weights", percent / 100)
        return self._info

    def submit(self, request: Request) -> None:
        if self.submit_error:
            raise self.submit_error
        with self._changed:
            self._submitted[request.req_id] = request
            self._changed.notify_all()

    def cancel(self, req_id: int) -> None:
        with self._changed:
            self.cancelled.append(req_id)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        self.num_asked += 1
        if self.state is not EngineState.READY:
            raise UnavailableError("the engine restarts")
        return self.now

    def take_timeline(self, goes_on: bool) -> tuple[list[Any], bool]:
        if self.state is not EngineState.READY:
            raise UnavailableError("the engine restarts")
        self.is_recording = goes_on
        runs, self.recorded = self.recorded, []
        return runs, self.is_full

    def close(self, drain_s: float = 0.0) -> None:
        self.is_closed = True

    # -- for tests --------------------------------------------------------------------------------

    @property
    def submitted(self) -> dict[int, Request]:
        with self._changed:
            return dict(self._submitted)

    def wait_submitted(self, count: int = 1) -> Request:
        """The request that was submitted last, once `count` have been."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._submitted) >= count, WAIT_S)
            return list(self._submitted.values())[-1]

    def wait_cancelled(self, req_id: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: req_id in self.cancelled, WAIT_S)

    def say(
        self, req_id: int, token_id: int, reason: FinishReason | None = None, **fields: Any
    ) -> None:
        """One token; its log-probability is -0.5 and a second choice is reported."""
        tops = [Logprob(token_id, -0.5, 1), Logprob(token_id + 1, float("-inf"), 2)]
        fields = {"logprob": -0.5, "top_logprobs": tops, **fields}
        self._on_output(TokenOutput(req_id, token_id, reason, **fields))

    def end(
        self,
        req_id: int,
        reason: FinishReason,
        code: str = "",
        message: str = "",
        reject_reason: str | None = None,
    ) -> None:
        """An end without a token."""
        error = {"error_code": code, "error_message": message, "reject_reason": reject_reason}
        self._on_output(TokenOutput(req_id, None, reason, **error))
