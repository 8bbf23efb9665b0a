"""HealthCheck: what vllm_backend does under ENABLE_VLLM_HEALTH_CHECK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flowprefill.engine_process import EngineState
from flowprefill.errors import UnavailableError
from flowprefill_backend.workers import Worker


class Engine(Protocol):
    """What is used of EngineClient."""

    @property
    def state(self) -> EngineState: ...


class Log(Protocol):
    """What is used of pb_utils.Logger."""

    def log_warn(self, message: str) -> None: ...

    def log_error(self, message: str) -> None: ...


class HealthCheck:
    """Refuses requests while the engine is down; has the model unloaded once that is for good."""

    def __init__(
        self, engine: Engine, unload: Callable[[], object] | None, worker: Worker, log: Log
    ) -> None:
        """unload: None = nothing is checked, so requests wait for a restart. worker: runs it, for
        the server may take its time."""
        self._engine = engine
        self._unload = unload
        self._worker = worker
        self._log = log
        self._is_unloading = False

    def check(self) -> None:
        """Raises UnavailableError."""
        if self._unload is None or self._engine.state is EngineState.READY:
            return
        if self._engine.state is EngineState.FAILED and not self._is_unloading:
            self._log.log_error("[flowprefill] Engine is not healthy and model will be unloaded")
            self._worker.post(self._try_to_unload)
            self._is_unloading = True
        raise UnavailableError("Model is unavailable due to unhealthy engine")

    def _try_to_unload(self) -> None:
        assert self._unload is not None
        try:
            self._unload()
        except Exception as error:  # for one, the server has no explicit model control
            self._log.log_warn(f"[flowprefill] the model cannot be unloaded: {error}")
