"""What goes wrong in a replay.

FlowPrefillError
  ReplayError      the replay cannot be made, or not so that it means what it should
TargetError        one request failed; the replay goes on
"""

from __future__ import annotations

from flowprefill.errors import FlowPrefillError


class ReplayError(FlowPrefillError):
    """The replay cannot be made, or not so that it means what it should."""


class TargetError(Exception):
    """One request failed, at the server or on the way."""

    def __init__(self, code: str, message: str) -> None:
        """code: a short word for counting, as INVALID_ARG or HTTP_503."""
        super().__init__(f"{code}: {message}")
