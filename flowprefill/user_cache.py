"""Where files go that only save the time of making them again, and how they get there.

Every cache (profiles, weights) is one folder of files below the user's cache directory. Several
processes may write the same file: each sees all of one version or nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written, or were when their process was killed."""


def user_cache_directory(name: str) -> Path:
    """$XDG_CACHE_HOME/flowprefill/`name`, or below ~/.cache. Relative paths do not count."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base, "flowprefill", name)


def make_directory(directory: Path) -> None:
    """Create `directory` and those above it. Raises OSError."""
    if not directory.is_absolute():
        raise FileNotFoundError("there is no home directory")
    directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end of the block, unless that raises.

    The directory must exist. Raises OSError; then nothing is left behind.
    """
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f"{path.stem}-", suffix=TEMPORARY_SUFFIX
    )
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)  # else a power cut may leave the new name with the old zeros
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
