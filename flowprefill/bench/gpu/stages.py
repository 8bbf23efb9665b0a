"""Stages of a bench that has so many minutes and no more. Knows nothing of what they measure.

What is left of the time is divided among the stages to come by their shares, so a stage that ends
early leaves its time to the others and a slow start takes a little of each. What does not fit is
cut and said to be cut. A stage that fails costs its own figures only. After each stage everything
so far is written to disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]
Say = Callable[[str], None]


class Budget:
    """The time of one stage."""

    def __init__(self, seconds: float, on_cut: Callable[[str], None]) -> None:
        self._end_s = time.monotonic() + seconds
        self._on_cut = on_cut

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for it, about so many seconds; if not it is noted as cut."""
        if self.left_s > seconds:
            return True
        self.cut(what)
        return False

    def cut(self, what: str) -> None:
        """Note that it is not, or not all, measured."""
        self._on_cut(what)

    def part(self, share: float) -> Budget:
        """A share of what is left, for one of several things that are measured."""
        return Budget(share * self.left_s, self._on_cut)


class Stages:
    """Runs stages one after the other and collects their figures."""

    def __init__(
        self,
        seconds: float,
        shares: Mapping[str, float],
        facts: Figures,
        json_out: Path | None,
        say: Say,
        is_dry_run: bool,
    ) -> None:
        """shares: of the stages to come, in their order; any unit
        facts: of the run, for the JSON object
        """
        self._end_s = time.monotonic() + seconds
        self._shares = dict(shares)
        self._facts = facts
        self._json_out = json_out
        self._say = say
        self._is_dry_run = is_dry_run
        self.figures: dict[str, Any] = {}
        """By stage."""
        self.cut: list[str] = []
        """What was not measured for lack of time, or of what it needs."""
        self.failed: dict[str, str] = {}
        """Reasons, by stage."""
        self.seconds: dict[str, float] = {}
        """That each stage took."""

    def run(self, name: str, work: Callable[[Budget], Figures]) -> Figures | None:
        """Run one stage; its figures, or None if it was cut or failed."""
        left_s = max(0.0, self._end_s - time.monotonic())
        budget = Budget(left_s * self._shares[name] / sum(self._shares.values()), self._note_cut)
        del self._shares[name]
        found = None
        if budget.allows(f"{name}: all of it"):
            start_s = time.monotonic()
            try:
                found = self.figures[name] = dict(work(budget))
            # whatever it is, out of memory for one: the other stages' figures are not lost by it
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
                self._say(f"FAILED: {name}: {self.failed[name]}")
            self.seconds[name] = round(time.monotonic() - start_s, 1)
        self.write()
        return found

    def _note_cut(self, what: str) -> None:
        self.cut.append(what)
        self._say(f"CUT: {what}")

    def to_json(self) -> dict[str, Any]:
        """Figures of a dry run stand under a key of their own: nobody takes them for a card's."""
        figures = {"dry_run": self.figures} if self._is_dry_run else self.figures
        return {
            "is_dry_run": self._is_dry_run,
            **figures,
            "cut": self.cut,
            "failed": self.failed,
            "stage_seconds": self.seconds,
            "run": self._facts,
        }

    def write(self) -> None:
        """Keep what there is: a run that is killed loses no stage that has ended."""
        if self._json_out is not None:
            self._json_out.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(self.to_json())
            self._json_out.write_text(line + "\n", encoding="utf-8")
