"""When a refused request may succeed: said in the text of its error, for the text is all that
reaches every client, over HTTP, gRPC and calls between models.
"""

from __future__ import annotations

import re

_HINT = re.compile(r"; try again in (\d+(?:\.\d+)?) s$")


def with_retry_after(message: str, retry_after_s: float) -> str:
    """`message` with the hint at its end."""
    return f"{message}; try again in {max(0.0, retry_after_s):.1f} s"


def read_retry_after_s(message: str) -> float | None:
    """The seconds that `message` names; None without a hint."""
    hint = _HINT.search(message)
    return float(hint[1]) if hint else None
