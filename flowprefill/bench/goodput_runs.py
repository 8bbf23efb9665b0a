"""The measuring part of `flowprefill bench goodput`: a stretch of a trace replayed on engines.

A cell is one policy at one granularity; everything else in model.json is the same for all. Each
cell sees the same arrivals and lengths, in one go: started anew for a few dozen requests at a time
an engine would carry twice the load, as what it has not served by then waits for nobody. Idle time
is cut out. Times are those of the machine at the speed of its profile (pace.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from flowprefill.bench.engine_replay import EngineReplayer
from flowprefill.bench.goodput_outcomes import (
    Outcome,
    OutcomeStore,
    Point,
    check_served,
    outcome_of,
    was_sent_late,
)
from flowprefill.bench.pace import Pace
from flowprefill.bench.progress import BenchProgress
from flowprefill.bench.report import BenchmarkError
from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine, scheduler_options
from flowprefill.recorder import Recorder
from flowprefill.replay.plan import plan_replay
from flowprefill.replay.records import ReplayRecord

if TYPE_CHECKING:
    from flowprefill.bench.goodput_plan import GoodputPlan

_PATIENCE_MS = 24 * 3600 * 1000.0
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


class GoodputRuns:
    """Measures points, each once; with a file, also across calls of the command."""

    def __init__(
        self,
        config: EngineConfig,
        plan: GoodputPlan,
        seed: int,
        progress: BenchProgress,
        store: OutcomeStore,
        pace: Pace,
    ) -> None:
        self._config = config
        self._plan = plan
        self._pace = pace
        self._seed = seed
        self._progress = progress
        self._store = store
        self._engine: tuple[Cell, Engine, EngineReplayer] | None = None

    def measure(self, cell: Cell, load: float, slo_scale: float = 1.0) -> list[Outcome]:
        """The outcome of each block."""
        point = Point(cell.name, load, slo_scale)
        found = self._store.outcomes.get(point)
        if found is None:
            found = self._outcomes(cell, point)
            self._store.add(point, found)
            self._progress.advance()
        return found

    def record(self, cell: Cell, load: float, num_requests: int) -> Recorder:
        """What the engine does with the first requests."""
        engine, _ = self._running(cell)
        self._progress.describe(f"timeline of {cell.name}")
        recorder = Recorder(MonotonicClock())
        engine.record(recorder)
        self._replay(cell, load, 1.0, self._pace.slowdown(), num_requests)
        engine.record(None)
        return recorder

    def close(self) -> None:
        if self._engine:
            self._engine[1].close()
            self._engine = None

    def _outcomes(self, cell: Cell, point: Point) -> list[Outcome]:
        self._running(cell)
        self._progress.describe(f"{cell.name} at load {point.load:.3g}")
        paced = self._pace.replay(partial(self._replayed, cell, point), is_void=was_sent_late)
        paced.value[0].drift = paced.drift
        return paced.value

    def _replayed(self, cell: Cell, point: Point, slowdown: float) -> list[Outcome]:
        engine, _ = self._running(cell)
        before = engine.stats()
        records = self._replay(cell, point.load, point.slo_scale, slowdown)
        after = engine.stats()
        outcomes = [outcome_of(block, slowdown) for block in self._plan.blocks(records)]
        outcomes[0].blocking_s = [r.blocking_s for r in records if r.blocking_s is not None]
        outcomes[0].num_preemptions = after.num_preemptions - before.num_preemptions
        outcomes[0].num_decisions = after.num_decisions - before.num_decisions
        return outcomes

    def _replay(
        self,
        cell: Cell,
        load: float,
        slo_scale: float,
        slowdown: float,
        num_requests: int | None = None,
    ) -> list[ReplayRecord]:
        """num_requests: the first ones; None = all. Raises BenchmarkError if one fails."""
        engine, replayer = self._running(cell)
        planned = plan_replay(*self._plan.offered(load, slo_scale, slowdown))[:num_requests]
        records = replayer.run(engine, planned, cut_idle=True)
        check_served(cell.name, records)
        return records

    def _running(self, cell: Cell) -> tuple[Engine, EngineReplayer]:
        """The cell's engine; one at a time is loaded."""
        if self._engine is None or self._engine[0] != cell:
            self.close()
            config = with_cell(self._config, cell)
            replayer = EngineReplayer(self._seed)
            engine = Engine(config, replayer.on_output, self._progress.show_loading)
            self._engine = cell, engine, replayer
        return self._engine[1], self._engine[2]


def with_cell(config: EngineConfig, cell: Cell) -> EngineConfig:
    """The configuration of a cell. Whoever waits long is late and not refused, so that all cells
    serve the same requests."""
    return replace(
        config,
        queue_timeout_ms=_PATIENCE_MS,
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
