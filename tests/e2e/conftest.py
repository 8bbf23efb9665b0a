"""Tests against a real tritonserver: that of tests/live_server.py, or one of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live_server import (
    LOAD_TIMEOUT_S,
    LONG_PROMPT,
    MODEL,
    ROOT,
    SYNC_MODEL,
    group_members,
    wait_for,
)

__all__ = [
    "LOAD_TIMEOUT_S",
    "LONG_PROMPT",
    "MODEL",
    "ROOT",
    "SYNC_MODEL",
    "group_members",
    "wait_for",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need the server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
