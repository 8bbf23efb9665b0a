"""Main of the engine process: one Engine behind one socket. Started by EngineChild only.

    python -m flowprefill.engine_server FD

Threads: main loads the engine and later closes it; a reader moves messages into the engine; the
channel's sender moves outputs out; the engine brings its own. The process lives at most as long as
its parent: at the socket's EOF it exits at once, whatever the engine is doing.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from flowprefill.child_process import EXIT_CRASHED, handle_messages, live_with_parent
from flowprefill.config import EngineConfig
from flowprefill.errors import FlowPrefillError, ModelLoadError
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill.timeline import DeviceRun
from flowprefill.wire import Channel, Kind, pack, pack_error

CPU_NICENESS = 5
FLUSH_S = 2.0


class EngineLike(Protocol):
    """What is needed of flowprefill.engine.Engine."""

    info: EngineInfo
    num_slices: int
    slice_s: float

    def submit(self, request: Request) -> None: ...
    def cancel(self, req_id: int) -> None: ...
    def stats(self) -> EngineStats: ...
    def take_timeline(self, goes_on: bool) -> tuple[list[DeviceRun], bool]: ...
    def close(self, drain_s: float = 0.0) -> None: ...


EngineFactory = Callable[
    [EngineConfig, Callable[[TokenOutput], None], Callable[[str, float], None]], EngineLike
]


class EngineServer:
    """Serves one Engine to the peer of `channel`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engine: EngineLike | None = None
        self._start: dict[str, Any] = {}
        self._started = threading.Event()
        self._closing = threading.Event()
        self._drain_s = 0.0

    def run(self) -> NoReturn:
        """Load, serve until CLOSE, exit. Never returns."""
        threading.Thread(target=self._read, name="wire-reader", daemon=True).start()
        self._started.wait()
        try:
            self._engine = self._load(EngineConfig.from_dict(self._start["config"]))
        except FlowPrefillError as error:
            self._fail_load(error)
        except Exception as error:
            traceback.print_exc()
            self._fail_load(ModelLoadError(f"{type(error).__name__}: {error}"))
        self._channel.send(pack(Kind.READY, self._engine.info.to_wire()))
        self._closing.wait()
        self._engine.close(self._drain_s)
        self._exit(0)

    def end_with_thread(self, args: threading.ExceptHookArgs) -> NoReturn:
        """threading.excepthook: without one of its threads the process must not look alive."""
        traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
        self._exit(EXIT_CRASHED)

    def _load(self, config: EngineConfig) -> EngineLike:
        if config.device != "cuda" and not Path("/dev/nvidiactl").exists():
            # Linux applies this to the calling thread and those it starts: the engine and its
            # operators step back; reader and sender, started before, keep the server's priority
            os.nice(CPU_NICENESS)
        module, _, name = self._start["engine_factory"].partition(":")
        factory: EngineFactory = getattr(importlib.import_module(module), name)
        return factory(config, self._on_output, self._on_progress)

    def _on_output(self, output: TokenOutput) -> None:
        self._channel.send(pack(Kind.OUTPUT, output.to_wire()))

    def _on_progress(self, stage: str, fraction: float) -> None:
        self._channel.send(pack(Kind.PROGRESS, [stage, fraction]))

    def _fail_load(self, error: FlowPrefillError) -> NoReturn:
        self._channel.send(pack(Kind.LOAD_FAILED, pack_error(error)))
        self._exit(EXIT_CRASHED)

    def _exit(self, code: int) -> NoReturn:
        self._channel.flush(FLUSH_S)
        # past atexit handlers and destructors: they can hang on device and thread state
        os._exit(code)

    def _read(self) -> NoReturn:
        handle_messages(self._channel.receive, self._handle)

    def _handle(self, kind: Kind, body: Any) -> None:
        if kind is Kind.START:
            self._start = body
            self._started.set()
            return
        engine = self._engine
        if engine is None:
            assert kind is Kind.CLOSE, f"{kind} before READY"
            os._exit(0)
        if kind is Kind.SUBMIT:
            self._submit(engine, body)
        elif kind is Kind.CANCEL:
            engine.cancel(body)
        elif kind is Kind.STATS:
            serial, _ = body
            self._channel.send(pack(kind, [serial, engine.stats().to_wire()]))
        elif kind is Kind.TIMELINE:
            serial, goes_on = body
            runs, is_full = engine.take_timeline(goes_on)
            self._channel.send(pack(kind, [serial, [[run.to_wire() for run in runs], is_full]]))
        elif kind is Kind.PING:
            self._channel.send(pack(Kind.PONG, [engine.num_slices, engine.slice_s]))
        elif kind is Kind.CLOSE:
            self._drain_s = body
            self._closing.set()

    def _submit(self, engine: EngineLike, wire: dict[str, Any]) -> None:
        try:
            engine.submit(Request.from_wire(wire))
            return
        except FlowPrefillError as error:
            refusal = error
        except Exception as error:  # a request that trips us must not take the others along
            traceback.print_exc()
            refusal = FlowPrefillError(f"{type(error).__name__}: {error}")
        self._on_output(
            TokenOutput(
                wire["req_id"],
                finish_reason=FinishReason.ERROR,
                error_code=refusal.code,
                error_message=str(refusal),
                reject_reason=refusal.reject_reason,
            )
        )


def main() -> NoReturn:
    live_with_parent()
    server = EngineServer(Channel(socket.socket(fileno=int(sys.argv[1]))))
    threading.excepthook = server.end_with_thread
    server.run()


if __name__ == "__main__":
    main()
