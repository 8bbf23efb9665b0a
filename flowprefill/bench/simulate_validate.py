"""`flowprefill simulate --validate`: the same requests through the engine and the simulator.

The engine runs in this process, open loop and in real time; the simulator takes this CPU's profile.
What a prefill takes beside its slices comes from a few prompts that have the engine for themselves,
and how much slower than its profile the busy machine is from a burst of prompts that displace each
other. Nothing is taken from the runs that are compared. Prompts are those of engine_replay.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from flowprefill.bench.engine_replay import EngineReplayer
from flowprefill.bench.goodput_outcomes import check_served
from flowprefill.bench.goodput_runs import Cell, with_cell
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.simulate_plan import Plan, take_window
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile
from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.records import (
    ReplayRecord,
    attainment,
    is_void,
    send_lag_figures,
    send_lag_p99_s,
)
from flowprefill.replay.summary import send_lag_text
from flowprefill.simulator.profiled import ProfiledPlatform
from flowprefill.simulator.replay import Replay, Setup, at_load, scaled
from flowprefill.workload import Objective, TraceRequest

if TYPE_CHECKING:
    from rich.table import Table

_NUM_LENGTHS = 8
_NUM_ROUNDS = 5
_ALONE_S = 30.0
"""Objective of prompts that run alone; it decides nothing."""
_BURST_ROUNDS = 3
_BURST_LOAD = 1.5
_BURST_SLACK = 5.0
"""Objectives of a burst, times what a prompt takes alone: short ones are urgent, and displace."""


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    attainment: float
    mean_ttft_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    num_preemptions: int

    @staticmethod
    def of(attainment: float, ttfts_s: Sequence[float], num_preemptions: int) -> Outcome:
        """ttfts_s: of all requests."""
        p50_s, p99_s = (percentile(ttfts_s, q) for q in (50, 99))
        return Outcome(attainment, sum(ttfts_s) / len(ttfts_s), p50_s, p99_s, num_preemptions)


@dataclass(frozen=True)
class Comparison:
    """One policy at one granularity on one window at one load, measured and simulated."""

    trace: str
    policy: str
    granularity: str
    load: float
    num_requests: int
    engine: Outcome
    simulator: Outcome
    median_ttft_ratio: float
    """Simulated over measured TTFT, request by request: far from 1 if the machine's speed is not
    what it was when it was calibrated."""
    send_lag_p99_s: float

    @property
    def attainment_error_points(self) -> float:
        """Simulated minus measured, in percent of the requests."""
        return 100 * (self.simulator.attainment - self.engine.attainment)

    @property
    def mean_ttft_error(self) -> float:
        """Simulated over measured, minus 1."""
        return self.simulator.mean_ttft_s / self.engine.mean_ttft_s - 1


@dataclass(frozen=True)
class Calibration:
    """How the machine is now, beside its profile."""

    slowness: float
    """Seconds of slices in a burst, measured over profiled."""
    overhead_s: float
    """Of a prefill, beside its slices and the choice of its tokens."""


def run(
    plan: Plan, config: EngineConfig, loads: Sequence[float], slo_scale: float
) -> dict[str, Any]:
    """Compare at each load, print a table, return the JSON object.

    plan: of a ProfiledPlatform; config: the same model's; slo_scale: times all objectives
    Raises BenchmarkError if the engine fails a request.
    """
    from rich.console import Console

    cells = [Cell(*names) for names in itertools.product(plan.policies, plan.granularities)]
    found: list[Comparison] = []
    calibrations = []
    with bench_progress(len(cells) * len(plan.traces) * len(loads)) as progress:
        for cell in cells:
            replayer = EngineReplayer(plan.seed)
            cell_config = with_cell(config, cell)
            engine = Engine(cell_config, replayer.on_output, progress.show_loading)
            try:
                validator = _Validator(plan, cell, engine, replayer, progress)
                calibrations.append(validator.calibrate())
                found += [
                    validator.compare(path, load, slo_scale)
                    for path, load in itertools.product(plan.traces, loads)
                ]
            finally:
                engine.close()
    Console(width=160).print(make_table(found))
    return summarise(found, calibrations)


class _Validator:
    """One cell, on an engine that has nothing else to do."""

    def __init__(
        self,
        plan: Plan,
        cell: Cell,
        engine: Engine,
        replayer: EngineReplayer,
        progress: BenchProgress,
    ) -> None:
        assert isinstance(plan.platform, ProfiledPlatform)
        self._plan = plan
        self._cell = cell
        self._granularity = Granularity.parse(cell.granularity)
        self._engine = engine
        self._replayer = replayer
        self._progress = progress
        self._platform = plan.platform

    def calibrate(self) -> Calibration:
        """Run prompts of typical lengths, alone and in a burst; simulate what they show."""
        self._progress.describe(f"{self._cell.name} calibrating")
        lengths = [r.input_tokens for path in self._plan.traces for r in self._window(path)]
        chosen = np.quantile(lengths, np.linspace(0.0, 1.0, _NUM_LENGTHS)).astype(int).tolist()
        cost, granularity = self._platform.cost(self._granularity), self._granularity
        profiled = [cost.timeline([(n, 0)], granularity).total_s for n in chosen]
        # Round by round, so that a disturbance hits all lengths a little instead of one fully.
        rounds = [[self._solo_ttft_s(n) for n in chosen] for _ in range(_NUM_ROUNDS)]
        measured = [median(times) for times in zip(*rounds, strict=True)]
        alone = self._believe(fit_calibration(profiled, measured))
        return self._believe(replace(alone, slowness=alone.slowness * self._burst_ratio(chosen)))

    def _believe(self, calibration: Calibration) -> Calibration:
        """Simulate with it from now on."""
        assert isinstance(self._plan.platform, ProfiledPlatform)
        times = self._plan.platform.times.slowed(calibration.slowness, calibration.overhead_s)
        self._platform = replace(self._platform, times=times)
        return calibration

    def _burst_ratio(self, lengths: Sequence[int]) -> float:
        """Measured over simulated time of a burst: the engine has work from its start to its end,
        so the time does not depend on who is served first."""
        prompts = random.Random(0).sample(lengths, len(lengths)) * _BURST_ROUNDS
        solo_s = [self._platform.cost(self._granularity).prefill_s(n) for n in prompts]
        gap_s = sum(solo_s) / len(solo_s) / _BURST_LOAD
        requests = [TraceRequest(i * gap_s, "", n, 1) for i, n in enumerate(prompts)]
        goals = [Objective("burst", _BURST_SLACK * s, _ALONE_S) for s in solo_s]
        records = self._replay(plan_replay(requests, goals))
        measured_s = max(r.token_s[0] for r in records) - records[0].sent_s
        simulated = Replay(requests, self._setup(), objectives=goals).run_all()
        return measured_s / max(r.first_token_s for r in simulated.records.values())

    def compare(self, path: Path, load: float, slo_scale: float) -> Comparison:
        """Both on the trace's first window at this load."""
        self._progress.describe(f"{self._cell.name} {path.stem} at load {load:g}")
        window = take_window(self._plan, path, 0)
        requests = at_load(window.requests, load, self._platform)
        goals = [scaled(goal, slo_scale) for goal in window.objectives]
        num_before = self._engine.stats().num_preemptions
        records = self._replay(plan_replay(requests, goals))
        num_preemptions = self._engine.stats().num_preemptions - num_before
        simulated = Replay(requests, self._setup(), objectives=goals).run_all()
        self._progress.advance()
        ttfts_s = [record.ttft_s for record in records]
        theirs_s = [record.ttft_s for record in simulated.records.values()]
        return Comparison(
            path.stem,
            self._cell.policy,
            self._cell.granularity,
            load,
            len(records),
            Outcome.of(attainment(records), ttfts_s, num_preemptions),
            Outcome.of(simulated.attainment, theirs_s, simulated.scheduler.num_preemptions()),
            median(b / a for a, b in zip(ttfts_s, theirs_s, strict=True)),
            send_lag_p99_s(records),
        )

    def _setup(self) -> Setup:
        """With exact predictions."""
        return Setup(self._cell.policy, self._granularity, 0.0, 0, self._platform)

    def _window(self, path: Path) -> list[TraceRequest]:
        return take_window(self._plan, path, 0).requests

    def _solo_ttft_s(self, num_tokens: int) -> float:
        goal = Objective("alone", _ALONE_S, _ALONE_S)
        return self._replay([PlannedRequest(0, 0.0, num_tokens, 1, goal)])[0].ttft_s

    def _replay(self, planned: Sequence[PlannedRequest]) -> list[ReplayRecord]:
        records = self._replayer.run(self._engine, planned)
        check_served(self._cell.name, records)
        return records


def fit_calibration(profiled_s: Sequence[float], measured_s: Sequence[float]) -> Calibration:
    """measured = slowness x profiled + overhead, by least squares of relative errors; without the
    overhead if one of them comes out negative."""
    profiled, measured = np.array(profiled_s), np.array(measured_s)
    design = np.column_stack([profiled, np.ones_like(profiled)]) / measured[:, None]
    (slowness, overhead_s), *_ = np.linalg.lstsq(design, np.ones_like(measured), rcond=None)
    if min(slowness, overhead_s) < 0:
        ratios = profiled / measured
        slowness, overhead_s = ratios.sum() / (ratios**2).sum(), 0.0
    return Calibration(float(slowness), float(overhead_s))


def summarise(found: Sequence[Comparison], calibrations: Sequence[Calibration]) -> dict[str, Any]:
    """The JSON object; errors at the top are the worst of all comparisons."""
    return {
        "attainment_error_points": round(max(abs(c.attainment_error_points) for c in found), 2),
        "mean_ttft_error": round(max(abs(c.mean_ttft_error) for c in found), 4),
        **send_lag_figures(max(c.send_lag_p99_s for c in found)),
        "cells": [
            {
                **asdict(c),
                "attainment_error_points": round(c.attainment_error_points, 2),
                "mean_ttft_error": round(c.mean_ttft_error, 4),
            }
            for c in found
        ],
        "calibrations": [asdict(calibration) for calibration in calibrations],
    }


def make_table(found: Sequence[Comparison]) -> Table:
    """Measured and simulated, side by side."""
    from rich.table import Table

    table = Table(title="engine and simulator: share on time, mean TTFT in seconds")
    for heading in ("trace", "policy", "boundaries"):
        table.add_column(heading)
    headings = ("load", "on time", "simulated", "points", "mean TTFT", "simulated", "error")
    for heading in (*headings, "preempted", "simulated", "send lag p99"):
        table.add_column(heading, justify="right")
    for c in found:
        table.add_row(
            c.trace,
            c.policy,
            c.granularity,
            f"{c.load:g}",
            f"{c.engine.attainment:.3f}",
            f"{c.simulator.attainment:.3f}",
            f"{c.attainment_error_points:+.1f}",
            f"{c.engine.mean_ttft_s:.4f}",
            f"{c.simulator.mean_ttft_s:.4f}",
            f"{c.mean_ttft_error:+.1%}",
            str(c.engine.num_preemptions),
            str(c.simulator.num_preemptions),
            send_lag_text(1000 * c.send_lag_p99_s, is_void(c.send_lag_p99_s)),
        )
    return table
