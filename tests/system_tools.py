"""Programs of the system's packages that some tests drive: installed here or not."""

from __future__ import annotations

import os
import shutil

import pytest


def system_tool(name: str, package: str) -> str:
    """Path of a program. Without it the test is skipped, or fails in CI, which installs it."""
    path = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
    if path is None:
        missing = f"no {name} here: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
