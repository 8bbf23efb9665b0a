"""The measuring part of `flowprefill bench goodput`: a stretch of a trace replayed on engines.

A cell is one policy at one granularity; everything else in model.json is the same for all. Each
cell sees the same arrivals and prompts, in one go: started anew for a few dozen requests at a time
an engine would carry twice the load, as what it has not served by then waits for nobody. Idle time
is cut out. Outcomes are kept by blocks of consecutive requests, over which intervals are taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowprefill.bench.engine_replay import EngineReplayer
from flowprefill.bench.progress import BenchProgress
from flowprefill.bench.report import BenchmarkError
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine, scheduler_options
from flowprefill.replay.plan import plan_replay
from flowprefill.replay.records import ReplayRecord, by_class
from flowprefill.simulator.replay import at_load

if TYPE_CHECKING:
    from flowprefill.bench.goodput_plan import GoodputPlan

_FREE_KNOBS = frozenset({"policy", "granularity"})
"""What may differ between two cells."""


@dataclass(frozen=True)
class Cell:
    """What is compared."""

    policy: str
    granularity: str

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.granularity}"

    @staticmethod
    def parse(name: str) -> Cell:
        """Of `policy/granularity`."""
        policy, _, granularity = name.partition("/")
        return Cell(policy, granularity)


@dataclass(frozen=True)
class Point:
    """One measurement of a cell."""

    cell: Cell
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


class GoodputRuns:
    """Measures points, each once; with a file, also across calls of the command."""

    def __init__(
        self,
        config: EngineConfig,
        plan: GoodputPlan,
        seed: int,
        progress: BenchProgress,
        store: OutcomeStore,
    ) -> None:
        self._config = config
        self._plan = plan
        self._seed = seed
        self._progress = progress
        self._store = store
        self._engine: tuple[Cell, Engine, EngineReplayer] | None = None

    def measure(self, point: Point) -> list[Outcome]:
        """The outcome of each block."""
        found = self._store.outcomes.get(point)
        if found is None:
            found = self._replay(point)
            self._store.add(point, found)
            self._progress.advance()
        return found

    def close(self) -> None:
        if self._engine:
            self._engine[1].close()
            self._engine = None

    def _replay(self, point: Point) -> list[Outcome]:
        self._progress.describe(f"{point.cell.name} at load {point.load:.3g}")
        engine, replayer = self._running(point.cell)
        window = self._plan.window
        requests = at_load(window.requests, point.load, self._plan.platform)
        goals = [replace(o, ttft_s=o.ttft_s * point.slo_scale) for o in window.objectives]
        before = engine.stats()
        records = replayer.run(engine, plan_replay(requests, goals), cut_idle=True)
        after = engine.stats()
        failed = next((r.error for r in records if r.error), None)
        if failed:
            raise BenchmarkError(f"{point.cell.name}: a request failed: {failed}")
        outcomes = [_outcome(block) for block in self._plan.blocks(records)]
        outcomes[0].blocking_s = list(after.blocking_s[len(before.blocking_s) :])
        outcomes[0].num_preemptions = after.num_preemptions - before.num_preemptions
        outcomes[0].num_decisions = after.num_decisions - before.num_decisions
        return outcomes

    def _running(self, cell: Cell) -> tuple[Engine, EngineReplayer]:
        """The cell's engine; one at a time is loaded."""
        if self._engine is None or self._engine[0] != cell:
            self.close()
            config = with_cell(self._config, cell)
            replayer = EngineReplayer(self._seed)
            engine = Engine(config, replayer.on_output, self._progress.show_loading)
            self._engine = cell, engine, replayer
        return self._engine[1], self._engine[2]


def _outcome(records: Sequence[ReplayRecord]) -> Outcome:
    classes = by_class(records)
    return Outcome(
        {name: len(members) for name, members in classes.items()},
        {name: sum(r.is_on_time for r in members) for name, members in classes.items()},
        {name: [r.ttft_s for r in members] for name, members in classes.items()},
        [gap for record in records for gap in record.times.tbt_s],
        [record.send_lag_s for record in records],
    )


def with_cell(config: EngineConfig, cell: Cell) -> EngineConfig:
    """The configuration of a cell."""
    return replace(
        config,
        policy=cell.policy,  # type: ignore[arg-type]
        granularity=cell.granularity,
    )


def check_same_knobs(configs: Sequence[EngineConfig]) -> None:
    """Raises BenchmarkError if cells differ in more than policy and granularity: tuned by hand, a
    cell would win by its tuning."""
    first = configs[0]
    for other in configs[1:]:
        for knob in dataclasses.fields(EngineConfig):
            ours, theirs = getattr(first, knob.name), getattr(other, knob.name)
            if knob.name not in _FREE_KNOBS and ours != theirs:
                raise BenchmarkError(f"cells differ in {knob.name}: {ours!r} and {theirs!r}")
        # what the granularity stands for apart, also the scheduler must have been told the same
        told = [scheduler_options(c, saturation_tokens=1) for c in (first, other)]
        if told[0] != told[1]:
            raise BenchmarkError(f"schedulers differ: {told[0]} and {told[1]}")


class OutcomeStore:
    """Outcomes by point, and a file of them: a run that was ended goes on where it was."""

    def __init__(self, path: Path | None, key: str) -> None:
        """key: of everything else that outcomes depend on. Raises BenchmarkError if the file is of
        another."""
        self.outcomes: dict[Point, list[Outcome]] = {}
        self._path = path
        if path and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            if not lines or json.loads(lines[0]) != {"key": key}:
                raise BenchmarkError(f"{path}: outcomes of another configuration or trace")
            self.outcomes.update(_parse(line) for line in lines[1:])
        elif path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")

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
    values = row["point"]
    point = Point(Cell(**values["cell"]), values["load"], values["slo_scale"])
    return point, [Outcome(**outcome) for outcome in row["outcomes"]]
