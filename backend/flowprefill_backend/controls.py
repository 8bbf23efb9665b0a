"""Controls: requests that ask something of the model itself, and how they are answered.

None of them is ever live, so nothing can cancel it, and none is counted as a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from flowprefill.engine_process import EngineState
from flowprefill.stats import EngineStats
from flowprefill_backend.live import LiveRequest, LiveRequests
from flowprefill_backend.request import Control
from flowprefill_backend.response import error_response, text_response
from flowprefill_backend.timeline import Timelines
from flowprefill_backend.workers import Worker


class Engine(Protocol):
    """What is used of EngineClient."""

    def stats(self) -> EngineStats: ...

    @property
    def state(self) -> EngineState: ...


class Controls:
    """Answers at once, but for the engine's statistics and for recordings."""

    def __init__(
        self,
        engine: Engine,
        requests: LiveRequests,
        timelines: Timelines,
        cancel: Callable[[LiveRequest], bool],
        answer: Callable[[LiveRequest, Any], None],
        worker: Worker,
    ) -> None:
        """cancel(live): False if there was nothing left to cancel. answer(live, response): the only
        one that it gets. worker: asks the engine, which may take its time to answer."""
        self._engine = engine
        self._requests = requests
        self._timelines = timelines
        self._cancel = cancel
        self._answer = answer
        self._worker = worker

    def obey(self, live: LiveRequest, command: Control) -> None:
        """Raises FlowPrefillError where it can be told at once that it will not do."""
        if command.timeline_s:
            self._timelines.begin(live, command.timeline_s)
        elif command.timeline_s is not None:
            self._answer(live, text_response("ended" if self._timelines.end() else "not found"))
        elif command.wants_state:
            self._answer(live, text_response(self._engine.state.value))
        elif command.cancel_id is not None:
            target = self._requests.latest(command.cancel_id)
            is_cancelled = target is not None and self._cancel(target)
            self._answer(live, text_response("cancelled" if is_cancelled else "not found"))
        else:
            self._worker.post(partial(self._send_stats, live))

    def _send_stats(self, live: LiveRequest) -> None:
        try:
            response = text_response(json.dumps(self._engine.stats().to_wire()))
        except Exception as error:  # whatever it is, this client must hear of it
            response = error_response(error, live.names_error_code)
        self._answer(live, response)
