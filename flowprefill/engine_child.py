"""EngineChild: one life of the engine process, as its parent holds it.

Knows neither requests nor restarts.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable

from flowprefill.child_process import STACK_DUMP_SIGNAL, describe_exit, spawn_module, wait_exit
from flowprefill.config import EngineConfig
from flowprefill.wire import Channel, Kind, pack

REAP_S = 2.0
LOG_END_S = 0.5
STACK_DUMP_S = 0.3


class EngineChild:
    """Spawns `flowprefill.engine_server`, forwards what it prints by line, kills and reaps it."""

    def __init__(
        self, config: EngineConfig, engine_factory: str, on_log: Callable[[str], None]
    ) -> None:
        """Returns once the process runs; READY or LOAD_FAILED follows. OSError if it cannot run."""
        self._process, ours = spawn_module("flowprefill.engine_server", output=subprocess.PIPE)
        self.channel = Channel(ours)
        self._log_thread = threading.Thread(
            target=self._forward_log, args=(on_log,), name="engine-log", daemon=True
        )
        self._log_thread.start()
        start = {"config": config.to_dict(), "engine_factory": engine_factory}
        self.channel.send(pack(Kind.START, start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def dump_stacks(self) -> None:
        """Make the process log where each of its threads stands, while it still can."""
        self._process.send_signal(STACK_DUMP_SIGNAL)
        time.sleep(STACK_DUMP_S)  # the handler is C code and answers even while the GIL is held

    def end(self, grace_s: float = 0.0) -> str:
        """Kill the process unless it ends within `grace_s`; reap it. Returns how it ended.

        Bounded: a process that the kernel cannot end (stuck in a driver) is left behind.
        """
        code = wait_exit(self._process, grace_s)
        if code is None:
            self._process.kill()  # Popen never signals a pid that was reaped
            code = wait_exit(self._process, REAP_S)
        self._log_thread.join(LOG_END_S)
        self.channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return "cannot be killed" if code is None else describe_exit(code)

    def _forward_log(self, on_log: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                # whatever a callback does, keep reading: a full pipe would stop the engine
                with contextlib.suppress(Exception):
                    on_log(line.rstrip("\n"))
