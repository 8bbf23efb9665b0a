"""What tritonserver's metrics page says of one model."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable

from flowprefill.server import TritonServer
from tests.live_server import wait_for

WAIT_S = 60.0
ENDS = ("finished", "cancelled", "rejected", "failed")


class Page:
    """What the page says of one model at one moment."""

    def __init__(self, server: TritonServer, model: str) -> None:
        with urllib.request.urlopen(server.metrics_url, timeout=10) as reply:
            self.text = reply.read().decode()
        self.kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", self.text, re.MULTILINE))
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", self.text, re.MULTILINE):
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if pairs.pop("model", None) == model and pairs.pop("version", None) == "1":
                self.values[(name, frozenset(pairs.items()))] = float(value)

    def value(self, name: str, **labels: str) -> float:
        return self.values[(name, frozenset(labels.items()))]

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def requests(self, what: str) -> float:
        return self.total(f"flowprefill_requests_{what}_total")

    def is_balanced(self) -> bool:
        ended = sum(self.requests(end) for end in ENDS)
        return self.requests("started") == ended + self.value("flowprefill_requests_live")

    def gauges(self) -> dict[str, float]:
        """Those that are 0 at rest."""
        names = ("vllm:num_requests_waiting", "vllm:num_requests_running",
                 "vllm:kv_cache_usage_perc", "flowprefill_parked_bytes",
                 "flowprefill_requests_live")  # fmt: skip
        used = {"kv_cache_block_type": "used"}
        blocks = self.value("nv_trt_llm_kv_cache_block_metrics", **used)
        return {**{name: self.value(name) for name in names}, "blocks": blocks}


def settled(server: TritonServer, model: str, condition: Callable[[Page], bool], what: str) -> Page:
    """A page of which this is true, and that is no half of an update: so was the one before."""
    pages = [Page(server, model)]

    def look() -> Page | None:
        pages.append(Page(server, model))
        is_same = pages[-1].values == pages[-2].values
        return pages[-1] if is_same and condition(pages[-1]) else None

    found: Page = wait_for(look, WAIT_S, what)
    return found
