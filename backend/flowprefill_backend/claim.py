"""Claim: which of a model's instances was loaded last.

tritonserver replaces a model whose files have changed under its name: the new instance takes the
requests, the old one ends with the last of its own, and is told nothing. Both put the same series
on the metrics page. So each leaves its name in a file that they share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import quote


class Claim:
    """One instance's. Its methods may be called from any thread."""

    def __init__(self, directory: Path, model: str, version: str) -> None:
        """directory: of the running server; the same for all its models."""
        self._path = directory / f"loaded-{quote(model, safe='')}-{version}"
        self._owner = f"{os.getpid()} {time.monotonic_ns()}"

    def take(self) -> None:
        """This instance is loaded. Raises OSError."""
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        draft.write_text(self._owner)
        draft.replace(self._path)  # so that nobody reads half of it

    @property
    def is_lost(self) -> bool:
        """Another instance has taken it since, and its process lives."""
        try:
            owner = self._path.read_text()
        except OSError:
            return False
        return owner != self._owner and Path(f"/proc/{owner.split()[0]}").exists()
