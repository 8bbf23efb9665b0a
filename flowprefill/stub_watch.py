"""StubWatch: finds model processes that died under tritonserver.

tritonserver 2.51 notices the death of a model's process (a stub) at that model's next request, and
never starts another; requests that were in it get no answer, and the model stays ready. A dead
process stays a zombie until its model is unloaded, which is how it is found here.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 1.0
_NUM_LOOKS = 3
"""So often in a row must it be seen: one that ends in order is a zombie for a moment too."""
_STUB_COMM = "triton_python_b"
"""The name of a stub, as far as the kernel keeps it."""
_PROC = Path("/proc")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class StubWatch:
    """Looks at the children of one tritonserver, at most once a second."""

    def __init__(
        self, server_pid: int, say: Callable[[str], None] = _say, proc: Path = _PROC
    ) -> None:
        """say: is told, once, if this kernel does not list a process's children."""
        self._server_pid = server_pid
        self._next_look_s = 0.0
        self._num_seen: dict[int, int] = {}
        task = proc / str(server_pid) / "task" / str(server_pid)
        if task.exists() and not (task / "children").exists():
            say(
                f"warning: no {task}/children (CONFIG_PROC_CHILDREN is off in this kernel): "
                "a model whose process dies will not be noticed"
            )

    def has_dead_stub(self) -> bool:
        """Whether a stub has died; true some seconds after that."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            dead = dead_stubs(self._server_pid)
            self._num_seen = {pid: self._num_seen.get(pid, 0) + 1 for pid in dead}
        return any(number >= _NUM_LOOKS for number in self._num_seen.values())


def dead_stubs(server_pid: int) -> set[int]:
    """Children of a process that are stubs, have ended, and were not waited for."""
    found = set()
    for thread in (_PROC / str(server_pid) / "task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in map(int, (thread / "children").read_text().split()):
                name, _, fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")
                if name.endswith(f"({_STUB_COMM}") and fields.split()[0] == "Z":
                    found.add(pid)
    return found
