"""Reads what tritonserver and the backend log: new lines as they come, and why a start failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r'^([IWEF])\d{4} [\d:.]+ \d+ (\S+)\] "?(.*?)"?$')
_LOAD_FAILURE = re.compile(r"^(failed to load '[^']*' version|Poll failed for model)")
_MAX_KEPT_CHARS = 1_000_000


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
    """Follows tritonserver's log file; keeps what was read, so it outlives the file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._offset = 0
        self._text = ""

    def follow(self, path: Path) -> None:
        """Read from `path` from now on."""
        self.path, self._offset, self._text = path, 0, ""

    def new_lines(self) -> list[str]:
        """The whole lines written since the last call."""
        if self.path is None:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        text = whole.decode("utf-8", errors="replace")
        self._text = (self._text + text)[-_MAX_KEPT_CHARS:]
        return text.splitlines()

    def text(self) -> str:
        """All that was logged, at most the last million characters."""
        self.new_lines()
        return self._text

    def close(self) -> None:
        """Read the rest; the file may go."""
        self.new_lines()
        self.path = None

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
