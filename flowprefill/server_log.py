"""Reads what tritonserver and the backend log: new lines as they come, and why a start failed."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import IO, NamedTuple

_LINE = re.compile(r'^([IWEF])\d{4} [\d:.]+ \d+ (\S+)\] "?(.*?)"?$')
_LOAD_FAILURE = re.compile(r"^(failed to load '[^']*' version|Poll failed for model)")
_MAX_KEPT_CHARS = 1_000_000
_LAST_LINES_S = 2.0
"""How long the pipe of an ended tritonserver is read: its children may still hold it open."""


class LogMessage(NamedTuple):
    """One line of tritonserver's log, taken apart."""

    level: str
    """I, W, E or F."""
    source: str
    """file:line of the sender; model.py:N and the like are the backend's."""
    text: str


def parse_line(line: str) -> LogMessage | None:
    """Take one line apart; None for tables and for what other libraries print."""
    match = _LINE.match(line)
    return LogMessage(*match.groups()) if match else None


class ServerLog:
    """Reads tritonserver's output from a pipe as it comes; keeps the last million characters."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what follows
        self._lines: deque[str] = deque()
        self._num_chars = 0
        self._num_new = 0

    def follow(self, pipe: IO[bytes]) -> None:
        """Read `pipe` to its end and close it, on a thread: a full pipe would stop the writer."""
        self._thread = threading.Thread(
            target=self._read, args=(pipe,), name="server-log", daemon=True
        )
        self._thread.start()

    def new_lines(self) -> list[str]:
        """The lines written since the last call, or what is kept of them."""
        with self._lock:
            num_new = min(self._num_new, len(self._lines))
            self._num_new = 0
            return list(self._lines)[len(self._lines) - num_new :]

    def text(self) -> str:
        """All that is kept."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines)

    def finish(self) -> None:
        """Wait for the last lines of a tritonserver that has ended."""
        if self._thread is not None:
            self._thread.join(_LAST_LINES_S)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode("utf-8", errors="replace").rstrip("\n")
                with self._lock:
                    self._lines.append(line)
                    self._num_new += 1
                    self._num_chars += len(line) + 1
                    while self._num_chars > _MAX_KEPT_CHARS:
                        self._num_chars -= len(self._lines.popleft()) + 1

    def failure_reason(self) -> str:
        """Why the server did not start, in its own words and one line."""
        lines = self.text().splitlines()
        messages = [message for message in map(parse_line, lines) if message]
        loads = [m.text for m in messages if m.level == "E" and _LOAD_FAILURE.match(m.text)]
        if loads:  # without the traceback, which is in the log
            return "; ".join(text.split(r"\n\nAt:")[0] for text in loads)
        errors = [line for line in lines if line.startswith("error:")]
        errors += [m.text for m in messages if m.level in "EF"]
        return (errors or lines or ["tritonserver wrote nothing"])[0]
