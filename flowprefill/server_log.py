"""Reads what tritonserver and the backend log: new lines as they come, why a start failed, and
whether a stop cut anything short.

Also what launcher and backend agree on for a stop, of which tritonserver tells its models nothing:
the launcher writes to a pipe that the backend finds in its environment, the backend to the log.
"""

from __future__ import annotations

import re
import signal
import threading
from collections import deque
from typing import IO, NamedTuple

from flowprefill.errors import ServerStartError

_LINE = re.compile(r'^([IWEF])\d{4} [\d:.]+ \d+ (\S+)\] "?(.*?)"?$')
_LOAD_FAILURE = re.compile(r"^(failed to load '[^']*' version|Poll failed for model)")
_STOPPING = re.compile(r"^\[flowprefill\] (.+) is stopping$")
_STOPPED = re.compile(r"^\[flowprefill\] (.+) has stopped, requests cut short: (\d+)$")
_IN_FLIGHT = re.compile(r"Found (\d+) model versions that have in-flight inferences")
_EXIT_TIMEOUT = "Exit timeout expired"
_MAX_KEPT_CHARS = 1_000_000
_LAST_LINES_S = 2.0
"""How long the pipe of an ended tritonserver is read: its children may still hold it open."""

STOP_FD_VARIABLE = "FLOWPREFILL_STOP_FD"
"""Environment variable: the pipe that can be read from once the server is stopping."""
EXIT_TIMEOUT_VARIABLE = "FLOWPREFILL_EXIT_TIMEOUT_S"
"""Environment variable: how long running requests may go on then, seconds."""

RUN_DIR_VARIABLE = "FLOWPREFILL_RUN_DIR"
"""Environment variable: a directory of the running server, in which its models leave files."""

GAVE_UP_FILE = "engine-gave-up"
"""A file in it: some model's engine is not restarted any more. Not a line of the log, for clients
too can switch off what is logged (v2/logging)."""

HTTP_ADDRESS_VARIABLE = "FLOWPREFILL_HTTP_ADDRESS"
"""Environment variable: host:port at which the server answers HTTP on this machine."""


def stopping_line(instance: str) -> str:
    """What a model instance logs when it takes no more requests."""
    return f"[flowprefill] {instance} is stopping"


def stopped_line(instance: str, num_cut_short: int) -> str:
    """What it logs once all its requests are answered, some perhaps before their end."""
    return f"[flowprefill] {instance} has stopped, requests cut short: {num_cut_short}"


def check_log_arguments(arguments: tuple[str, ...]) -> None:
    """Raise ServerStartError for one that takes lines from the log that are read here."""
    for argument in arguments:
        if argument.startswith("--log-") and not argument.startswith("--log-verbose"):
            raise ServerStartError(
                f"{argument}: not possible here, for only tritonserver's whole log tells why a "
                "start failed and whether a stop cut requests short; --verbose shows all of it"
            )


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

    def stop_problem(self, code: int) -> str | None:
        """What a stop cut short or left undone, in words, when tritonserver ended with `code`."""
        texts = [message.text for message in map(parse_line, self.text().splitlines()) if message]
        # Two instances of one name are those of a model that was loaded anew.
        stopped = [(match[1], int(match[2])) for match in map(_STOPPED.match, texts) if match]
        num_cut_short = sum(number for _, number in stopped)
        if num_cut_short:
            return f"requests cut short at the exit timeout: {num_cut_short}"
        if code in (0, -signal.SIGTERM):  # the latter while it loads
            return None
        # tritonserver 2.51 takes requests, unloading and HTTP connections that only idle out of one
        # exit timeout: that it ran out says nothing of the requests.
        stopping = sorted(match[1] for match in map(_STOPPING.match, texts) if match)
        in_flight = [match[1] for match in map(_IN_FLIGHT.search, texts) if match]
        have_stopped = sorted(name for name, _ in stopped)
        is_answered = stopping == have_stopped != [] and in_flight[-1:] == ["0"]
        if code == 1 and is_answered and any(_EXIT_TIMEOUT in text for text in texts):
            return None
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"tritonserver ended {how}"
