"""Scoreboard: the tallies of all classes and the table made of them. Knows no locust."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from attainment import Answer, Tally
from traffic import TrafficClass

COLUMNS = {
    "name": "Class",
    "requests": "# Requests",
    "failed": "# Fails",
    "ttft_slo": "TTFT SLO (ms)",
    "ttft_met": "TTFT met",
    "tbt_slo": "TBT SLO (ms)",
    "tbt_met": "TBT met",
    "attainment": "Attainment",
    "goodput": "Goodput/s",
}
"""Key of a cell -> title of its column."""


class Scoreboard:
    """Counts per class."""

    def __init__(self, classes: Sequence[TrafficClass]) -> None:
        self.slo_scale = 1.0
        """Factor on the objectives of all classes."""
        self._classes = classes
        self._tallies: dict[str, Tally] = {}
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self._tallies = {traffic.name: Tally() for traffic in self._classes}

    def finished(self, traffic: TrafficClass, answer: Answer) -> None:
        """Count a request that was answered or failed."""
        objective = traffic.objective.scaled(self.slo_scale)
        self._tallies[traffic.name].add(answer, objective)

    def cut_off(self, traffic: TrafficClass, answer: Answer, now_s: float) -> None:
        """Count a request that was stopped at `now_s` together with its user, if it was late."""
        objective = traffic.objective.scaled(self.slo_scale)
        self._tallies[traffic.name].add_cut_off(answer, objective, now_s)

    def take(self) -> dict[str, dict[str, int]]:
        """All counts, to be sent to another process; they are no longer here."""
        counts = {name: asdict(tally) for name, tally in self._tallies.items()}
        self.reset()
        return counts

    def merge(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add what another process took."""
        for name, tally in counts.items():
            self._tallies[name].merge(Tally(**tally))

    def rows(self, duration_s: float) -> list[dict[str, str]]:
        """A row per class and one of the total, cells under the keys of COLUMNS.

        duration_s: of the test so far, for goodput
        """
        total = Tally()
        rows = []
        for traffic in self._classes:
            tally = self._tallies[traffic.name]
            total.merge(tally)
            objective = traffic.objective.scaled(self.slo_scale)
            slos = {"ttft_slo": f"{objective.ttft_ms:g}", "tbt_slo": f"{objective.tbt_ms:g}"}
            rows.append({"name": traffic.name, **slos, **_cells(tally, duration_s)})
        return [
            *rows,
            {"name": "total", "ttft_slo": "", "tbt_slo": "", **_cells(total, duration_s)},
        ]


def to_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows under the titles of COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS.values())
    writer.writerows([row[key] for key in COLUMNS] for row in rows)
    return text.getvalue()


def _cells(tally: Tally, duration_s: float) -> dict[str, str]:
    goodput = tally.goodput(duration_s)
    return {
        "requests": str(tally.num_requests),
        "failed": str(tally.num_failed),
        "ttft_met": _percent(tally.share(tally.num_ttft_met)),
        "tbt_met": _percent(tally.share(tally.num_tbt_met)),
        "attainment": _percent(tally.attainment),
        "goodput": "-" if goodput is None else f"{goodput:.2f}",
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
