"""An engine without a model, for what a real one does not do by itself: wedge, crash, not load.

It counts up from a prompt's first token. `EngineConfig.model` chooses how it loads, a prompt how
the engine misbehaves. Run in a child process as `tests.stand_in_engine:StandInEngine`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError, EngineDeadError, PromptTooLongError
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill.timeline import DeviceRun

SLEEP_FOR_EVER, HOLD_THE_GIL, CRASH, RAISE, TOO_LONG, PRINT, BUG_IN_SUBMIT = range(900_000, 900_007)
RAISE_AND_HANG, LONG_SLICE = range(900_007, 900_009)
STEP_S = 0.002
LONG_SLICE_S = 1.5


class StandInEngine:
    def __init__(
        self,
        config: EngineConfig,
        on_output: Callable[[TokenOutput], None],
        on_progress: Callable[[str, float], None],
    ) -> None:
        load(config.model, on_progress)
        self.info = EngineInfo("stand-in", "cpu", "float32", 100, 1000, [0], 10, 16, "torch", True)
        self.num_slices = 0
        self.slice_s = 0.0
        self._on_output = on_output
        self._inbox: queue.SimpleQueue[Request | int | None] = queue.SimpleQueue()
        self._live: dict[int, tuple[Request, itertools.count[int]]] = {}
        self._unfinished: set[int] = set()
        self._death: str | None = None
        self._drain_until_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request: Request) -> None:
        if request.prompt_token_ids[0] == TOO_LONG:
            raise PromptTooLongError("101 tokens > max_model_len 100")
        if request.prompt_token_ids[0] == BUG_IN_SUBMIT:
            raise KeyError("bug")
        if self._death:
            raise EngineDeadError(self._death)
        self._unfinished.add(request.req_id)
        self._inbox.put(request)

    def cancel(self, req_id: int) -> None:
        self._inbox.put(req_id)

    def stats(self) -> EngineStats:
        return EngineStats(num_decoding=len(self._live), num_slices=self.num_slices)

    def take_timeline(self, goes_on: bool) -> tuple[list[DeviceRun], bool]:
        return [DeviceRun(None, (1,), 1.0, 2.0, goes_on)], False

    def close(self, drain_s: float = 0.0) -> None:
        self._drain_until_s = time.monotonic() + drain_s
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # as the real engine does
            self._death = f"the stand-in failed: {error}"
            for req_id in sorted(self._unfinished):
                self._fail(req_id, EngineDeadError(self._death))
            if isinstance(error, HangingError):
                time.sleep(1000)
            raise

    def _loop(self) -> None:
        is_open = True
        while is_open or (self._live and time.monotonic() < self._drain_until_s):
            while (is_open and not self._live) or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    is_open = False
                elif isinstance(message, int):
                    self._end(message, FinishReason.CANCELLED)
                else:
                    kind = message.prompt_token_ids[0]
                    self.slice_s = LONG_SLICE_S if kind == LONG_SLICE else 0.0
                    misbehave(kind)
                    self._live[message.req_id] = (message, itertools.count(1))
            for request, counter in list(self._live.values()):
                self._step(request, next(counter))
            time.sleep(STEP_S)
        for req_id in list(self._live):
            self._end(req_id, FinishReason.CANCELLED)

    def _step(self, request: Request, position: int) -> None:
        self.num_slices += 1
        is_last = position == request.sampling.max_tokens
        if is_last:
            del self._live[request.req_id]
            self._unfinished.discard(request.req_id)
        self._on_output(
            TokenOutput(
                request.req_id,
                request.prompt_token_ids[0] + position,
                FinishReason.LENGTH if is_last else None,
                token_s=time.monotonic(),
            )
        )

    def _end(self, req_id: int, reason: FinishReason) -> None:
        if self._live.pop(req_id, None):
            self._unfinished.discard(req_id)
            self._on_output(TokenOutput(req_id, finish_reason=reason))

    def _fail(self, req_id: int, error: EngineDeadError) -> None:
        output = TokenOutput(
            req_id,
            finish_reason=FinishReason.ERROR,
            error_code=error.code,
            error_message=str(error),
            reject_reason=error.reject_reason,
        )
        self._on_output(output)


class HangingError(RuntimeError):
    """The process does not end when its engine has."""


def load(model: str, on_progress: Callable[[str, float], None]) -> None:
    kind, _, path = model.partition(":")
    on_progress("weights", 0.5)
    if kind == "config-error":
        raise ConfigError("model.json: policy='x'")
    if kind == "os-error":
        raise OSError("disk on fire")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "once":  # loads the first time only
        Path(path).touch(exist_ok=False)
    if kind == "second-waits":  # a second load waits until the file at `path` is gone
        if Path(path).exists():
            while Path(path).exists():
                time.sleep(0.01)
        else:
            Path(path).touch()


def misbehave(kind: int) -> None:
    if kind == SLEEP_FOR_EVER:
        time.sleep(1000)
    if kind == HOLD_THE_GIL:
        re.match("(a+)+$", "a" * 60 + "b")
    if kind == CRASH:
        ctypes.string_at(0)
    if kind == RAISE:
        raise RuntimeError("engine thread fell over")
    if kind == RAISE_AND_HANG:
        raise HangingError("engine thread fell over")
    if kind == LONG_SLICE:
        time.sleep(LONG_SLICE_S)
    if kind == PRINT:
        print("hello from the engine", flush=True)
