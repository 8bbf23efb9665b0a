"""What goes wrong between ranks."""

from __future__ import annotations

from flowprefill.errors import FlowPrefillError


class RankError(FlowPrefillError):
    """A rank died, hangs, or did other work than rank 0. Ends all of them."""
