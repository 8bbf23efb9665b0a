"""What tritonserver's metrics page says of one model, as a scraper would read it."""

from __future__ import annotations

import re
import urllib.request

ENDS = ("finished", "cancelled", "rejected", "failed")
"""Ways in which a request may end."""
_AT_REST = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
            "flowprefill_parked_bytes", "flowprefill_requests_live")  # fmt: skip
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


class MetricsPage:
    """The samples of one model at one moment."""

    def __init__(self, text: str, model: str) -> None:
        """text: the whole page, of all models."""
        self.kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        """Family -> counter, gauge, histogram."""
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        """(Name, labels other than model and version) -> value."""
        for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if pairs.pop("model", None) == model and pairs.pop("version", None) == "1":
                self.values[(name, frozenset(pairs.items()))] = float(value)

    @classmethod
    def fetch(cls, url: str, model: str) -> MetricsPage:
        """The page as it is now. Raises OSError if nobody answers."""
        with urllib.request.urlopen(url, timeout=10) as reply:
            return cls(reply.read().decode(), model)

    def value(self, name: str, **labels: str) -> float:
        """Of exactly these labels. Raises KeyError for what is not on the page: that is not 0."""
        return self.values[(name, frozenset(labels.items()))]

    def total(self, name: str) -> float:
        """Over all labels; 0 for a counter of which there is no sample yet."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def requests(self, what: str) -> float:
        """started, or one of ENDS."""
        return self.total(f"flowprefill_requests_{what}_total")

    def num_lost(self) -> float:
        """Requests started that have neither ended nor are live."""
        ended = sum(self.requests(end) for end in ENDS)
        return self.requests("started") - ended - self.value("flowprefill_requests_live")

    def gauges(self) -> dict[str, float]:
        """Those that are 0 at rest. Raises KeyError if one is not on the page."""
        blocks = self.value(_BLOCKS, kv_cache_block_type="used")
        return {**{name: self.value(name) for name in _AT_REST}, "blocks": blocks}
