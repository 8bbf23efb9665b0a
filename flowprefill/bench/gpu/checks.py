"""A check: something that holds or does not; and a table of many. Knows not what is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


class NotChecked(Exception):
    """What a check is of is not there; says what."""


@dataclass(frozen=True)
class Check:
    """One claim about this device."""

    name: str
    run: Callable[[], str]
    """Returns what was found, in a few words. Raises NotChecked, or anything else if the claim does
    not hold."""


@dataclass(frozen=True)
class Finding:
    """What came of a check."""

    name: str
    outcome: str
    """passed, failed or not checked."""
    detail: str
    seconds: float


def run_checks(checks: Sequence[Check], on_check: Callable[[str], None]) -> list[Finding]:
    """All of them, whatever fails. on_check: is told the name of each before it runs"""
    findings = []
    for check in checks:
        on_check(check.name)
        start_s = time.perf_counter()
        outcome, detail = "passed", ""
        try:
            detail = check.run()
        except NotChecked as reason:
            outcome, detail = "not checked", str(reason)
        # a compiler's error, a driver's, a wrong number: each is this check's, the next one runs
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            outcome, detail = "failed", f"{type(error).__name__}: {' '.join(lines[:4])}"
        seconds = round(time.perf_counter() - start_s, 2)
        findings.append(Finding(check.name, outcome, detail, seconds))
    return findings


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, and how many there are of each outcome."""
    outcomes = [finding.outcome for finding in findings]
    return {
        "num_passed": outcomes.count("passed"),
        "num_failed": outcomes.count("failed"),
        "num_not_checked": outcomes.count("not checked"),
        "checks": [asdict(finding) for finding in findings],
    }


def make_table(findings: Sequence[Finding], title: str) -> Table:
    """One row per check."""
    from rich.markup import escape
    from rich.table import Table

    styles = {"passed": "green", "failed": "bold red", "not checked": "yellow"}
    table = Table("check", "", "found", title=title)
    table.add_column("s", justify="right")
    for one in findings:
        outcome = f"[{styles[one.outcome]}]{one.outcome}[/]"
        table.add_row(one.name, outcome, escape(one.detail), f"{one.seconds:.2f}")
    return table
