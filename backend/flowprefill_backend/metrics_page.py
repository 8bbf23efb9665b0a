"""MetricsPage: the series of one model on tritonserver's /metrics, over pb_utils.MetricFamily.

One thread calls it: each call is a round trip to the server's process, of 15 to 20 us.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from flowprefill_backend.metric_families import Family


class MetricsPage:
    """Counters and histograms are there from the start, at 0, so that rates see their first
    increment; gauges once they are set.

    The server takes them off its page when the families are freed, which tritonserver 2.51 may not
    survive where another instance has them too: they are kept as long as the process.
    """

    def __init__(
        self,
        families: Iterable[Family],
        labels: Mapping[str, str],
        label_values: Mapping[str, Iterable[str]],
    ) -> None:
        """labels: of every series. label_values: of a counter's or histogram's own label, all.

        Raises TritonModelException if the server has no metrics.
        """
        self._labels = dict(labels)
        self._families = {family.name: family for family in families}
        kinds = pb_utils.MetricFamily
        self._server_families = {
            family.name: kinds(
                name=family.name, description=family.description, kind=getattr(kinds, family.kind)
            )
            for family in self._families.values()
        }
        self._series: dict[tuple[str, ...], Any] = {}
        self._gauges: dict[tuple[str, ...], float] = {}
        for family in self._families.values():
            if family.kind != "GAUGE":
                for values in itertools.product(*(label_values[name] for name in family.labels)):
                    self._get(family.name, *values)

    def increment(self, by: float, name: str, *label_values: str) -> None:
        """label_values: of Family.labels, in that order, here and below"""
        self._get(name, *label_values).increment(by)

    def observe(self, value: float, name: str, *label_values: str) -> None:
        self._get(name, *label_values).observe(value)

    def set(self, value: float, name: str, *label_values: str) -> None:
        """Nothing is sent if it has this value."""
        key = (name, *label_values)
        if self._gauges.get(key) != value:
            self._get(*key).set(value)
            self._gauges[key] = value

    def refresh(self) -> None:
        """Send all gauges that were set again."""
        for key, value in self._gauges.items():
            self._get(*key).set(value)

    def shows(self, name: str) -> bool:
        """Whether it has the family."""
        return name in self._families

    def _get(self, name: str, *label_values: str) -> Any:
        key = (name, *label_values)
        series = self._series.get(key)
        if series is None:
            family = self._families[name]
            labels = {**self._labels, **dict(zip(family.labels, label_values, strict=True))}
            options = {"buckets": list(family.buckets)} if family.buckets else {}
            series = self._server_families[name].Metric(labels=labels, **options)
            self._series[key] = series
        return series
