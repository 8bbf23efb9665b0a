"""What a server's metrics page says of one model, and waiting for what it should say."""

from __future__ import annotations

from collections.abc import Callable

from flowprefill.bench.metrics_page import MetricsPage
from flowprefill.server import TritonServer
from tests.live_server import wait_for

WAIT_S = 60.0


def page_of(server: TritonServer, model: str) -> MetricsPage:
    return MetricsPage.fetch(server.metrics_url, model)


def settled(
    server: TritonServer,
    model: str,
    condition: Callable[[MetricsPage], bool],
    what: str,
    limit_s: float = WAIT_S,
) -> MetricsPage:
    """A page of which this is true, and that is no half of an update: so was the one before."""
    pages = [page_of(server, model)]

    def look() -> MetricsPage | None:
        pages.append(page_of(server, model))
        is_same = pages[-1].values == pages[-2].values
        return pages[-1] if is_same and condition(pages[-1]) else None

    found: MetricsPage = wait_for(look, limit_s, what)
    return found
