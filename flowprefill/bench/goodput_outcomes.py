"""What `bench goodput` and `bench servers` have in common: points, and what came of each.

A point is something named, such as an engine or a server, at one load. Outcomes are kept by blocks
of consecutive requests, over which intervals are taken. Knows no engine, no server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowprefill.bench.crossing import Curve, search, snap
from flowprefill.bench.report import BenchmarkError, code_digest
from flowprefill.metrics import percentile
from flowprefill.replay.records import ReplayRecord, by_class, is_void

TARGET = 0.9
"""Share of the requests that must be on time."""


@dataclass(frozen=True)
class Point:
    """One measurement."""

    name: str
    """Of what is measured."""
    load: float
    """1 = prompts arrive as fast as the device prefills them one by one."""
    slo_scale: float = 1.0
    """Times all TTFT objectives."""


@dataclass
class Outcome:
    """What came of one block of requests."""

    num_by_class: dict[str, int] = field(default_factory=dict)
    on_time_by_class: dict[str, int] = field(default_factory=dict)
    ttft_by_class: dict[str, list[float]] = field(default_factory=dict)
    """Seconds."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens."""
    send_lags_s: list[float] = field(default_factory=list)
    server_ttft_s: list[float] = field(default_factory=list)
    """By the clock of a server that tells it."""
    outside_server_s: list[float] = field(default_factory=list)
    """By how much the client's TTFT was longer than that."""
    slowdown: float = 1.0
    """Of the machine against its profile (pace.py); by it TTFTs and gaps are divided."""
    drift: float = 0.0
    """By which share the machine was faster or slower behind the replay than before."""
    blocking_s: list[float] = field(default_factory=list)
    """This and the counts below: of the whole replay, with its first block."""
    num_preemptions: int = 0
    num_decisions: int = 0

    @property
    def num_requests(self) -> int:
        return sum(self.num_by_class.values())

    @property
    def num_on_time(self) -> int:
        return sum(self.on_time_by_class.values())


def check_served(name: str, records: Sequence[ReplayRecord]) -> None:
    """Raises BenchmarkError if a request of what is called so failed."""
    failed = next((record.error for record in records if record.error), None)
    if failed:
        raise BenchmarkError(f"{name}: a request failed: {failed}")


def outcome_of(records: Sequence[ReplayRecord], slowdown: float = 1.0) -> Outcome:
    """What records say; nothing of what only the engine knows. slowdown: see Outcome"""
    classes = by_class(records)
    told = [(r.server_ttft_s, r.ttft_s) for r in records if r.server_ttft_s is not None]
    return Outcome(
        {name: len(members) for name, members in classes.items()},
        {name: sum(r.is_on_time for r in members) for name, members in classes.items()},
        {name: [r.ttft_s / slowdown for r in members] for name, members in classes.items()},
        [gap / slowdown for record in records for gap in record.times.tbt_s],
        [record.send_lag_s for record in records],
        [server_s for server_s, _ in told],
        [client_s - server_s for server_s, client_s in told],
        slowdown,
    )


def attainment(outcomes: Sequence[Outcome]) -> float:
    """Of all blocks together."""
    return sum(o.num_on_time for o in outcomes) / sum(o.num_requests for o in outcomes)


def worst_class_attainment(outcomes: Sequence[Outcome]) -> float:
    """Of the class that fares worst, all blocks together."""
    names = {name for o in outcomes for name in o.num_by_class}
    return min(
        sum(o.on_time_by_class.get(name, 0) for o in outcomes)
        / sum(o.num_by_class.get(name, 0) for o in outcomes)
        for name in names
    )


def send_lag_p99_s(outcomes: Sequence[Outcome]) -> float:
    """Of the replay that all these blocks are of."""
    return percentile([lag_s for o in outcomes for lag_s in o.send_lags_s], 99)


def was_sent_late(outcomes: Sequence[Outcome]) -> bool:
    """Whether the replay that all these blocks are of is void."""
    return is_void(send_lag_p99_s(outcomes))


def ttft_by_class(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds, of all blocks together."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, values in outcome.ttft_by_class.items():
            found.setdefault(name, []).extend(values)
    return found


@dataclass
class CellResult:
    """Everything measured of an engine or server: its outcomes, one of each block."""

    by_load: dict[float, list[Outcome]] = field(default_factory=dict)
    by_tightness: dict[float, list[Outcome]] = field(default_factory=dict)
    """With objectives divided by so much; empty where it was not asked for."""

    def replays(self) -> list[list[Outcome]]:
        """The outcomes of each."""
        return [*self.by_load.values(), *self.by_tightness.values()]


Measure = Callable[[Sequence[Outcome]], float]
"""A share of outcomes, as attainment."""


def search_loads(
    measure: Callable[[float], list[Outcome]], guess: float, measure_of: Measure, result: CellResult
) -> None:
    """Measure loads on both sides of where TARGET are on time, by that measure of attainment.

    measure: at a load; what is measured is added to result.by_load
    """

    def measure_at(load: float) -> None:
        result.by_load[load] = measure(load)

    search(measure_at, lambda: curve(result.by_load, measure_of), snap(guess), TARGET)


def curve(by_load: dict[float, list[Outcome]], measure_of: Measure) -> Curve:
    """Attainment by load, over all blocks."""
    return {load: measure_of(outcomes) for load, outcomes in by_load.items()}


class OutcomeStore:
    """Outcomes by point, and a file of them: a run that was ended goes on where it was."""

    def __init__(self, path: Path | None, key: str) -> None:
        """key: of everything that outcomes depend on beside the points and this code. Raises
        BenchmarkError if the file is of another, or of other code."""
        header = {"key": key, "code": code_digest()}
        self.outcomes: dict[Point, list[Outcome]] = {}
        self._path = path
        if path and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            if not lines or json.loads(lines[0]) != header:
                raise BenchmarkError(
                    f"{path}: outcomes of another configuration, trace, machine, profile or code"
                )
            read = map(_parse, lines[1:])
            # What was sent late is measured again: the machine may be quieter now.
            self.outcomes.update((point, kept) for point, kept in read if not was_sent_late(kept))
        elif path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def add(self, point: Point, outcomes: list[Outcome]) -> None:
        self.outcomes[point] = outcomes
        if self._path:
            row = {
                "point": dataclasses.asdict(point),
                "outcomes": [dataclasses.asdict(o) for o in outcomes],
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _parse(line: str) -> tuple[Point, list[Outcome]]:
    row = json.loads(line)
    return Point(**row["point"]), [Outcome(**outcome) for outcome in row["outcomes"]]
