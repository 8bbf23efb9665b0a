"""What `flowprefill bench goodput` measures: requests with objectives, cells, and where to look.

The same requests are simulated on this device's profile first: that says which chunk size of a
policy is worth measuring, and near which load to begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from flowprefill.bench.compared import BASELINE, CHUNK_SIZES, COMMON_CHUNK
from flowprefill.bench.crossing import crossing, search, snap
from flowprefill.bench.goodput_outcomes import TARGET
from flowprefill.bench.goodput_runs import Cell
from flowprefill.bench.simulate_plan import Plan, Window, take_window
from flowprefill.config import POLICIES
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.simulator.least_work import offline_bound_on
from flowprefill.simulator.platform import Platform
from flowprefill.simulator.replay import Replay, Setup, arrivals_of, at_load, rate_at_load_1
from flowprefill.workload import Objective, TraceRequest

T = TypeVar("T")

POLICY_CHUNKS = {"s-edf": 1, "goodput": 2, "srpt": 1}
"""Policies that are measured, and at how many of their chunk sizes, the best ones by simulation."""


@dataclass(frozen=True)
class GoodputPlan:
    """Everything that is decided before the first engine is started."""

    platform: Platform
    window: Window
    """The requests, as they are run."""
    num_blocks: int
    guesses: Mapping[Cell, tuple[float, float]]
    """Cells, and the loads expected to be their highest: overall, and with every class."""
    every_class_cells: frozenset[Cell]
    """Those of which the load with 90% of every class is searched."""
    tightness_cells: frozenset[Cell]
    """Those of which the tightest objectives are searched."""
    length_scale: float

    @property
    def rate_at_load_1(self) -> float:
        """Requests per second."""
        return rate_at_load_1(self.window.requests, self.platform)

    def offered(
        self, load: float, slo_scale: float = 1.0
    ) -> tuple[list[TraceRequest], list[Objective]]:
        """The requests at that load, and their objectives times slo_scale."""
        requests = at_load(self.window.requests, load, self.platform)
        return requests, [replace(o, ttft_s=o.ttft_s * slo_scale) for o in self.window.objectives]

    def offline_bound(self, load: float, slo_scale: float = 1.0) -> int | None:
        """How many of them any schedule can serve in time at most; None: nobody knows."""
        requests, objectives = self.offered(load, slo_scale)
        arrivals = arrivals_of(requests, objectives, self.platform.block_tokens)
        return offline_bound_on(self.platform, arrivals)

    def blocks(self, items: Sequence[T]) -> list[Sequence[T]]:
        """What belongs to each request, by blocks of consecutive ones."""
        edges = [round(i * len(items) / self.num_blocks) for i in range(self.num_blocks + 1)]
        return [items[low:high] for low, high in itertools.pairwise(edges)]


def make_plan(
    options: Plan, num_blocks: int, cell_names: Sequence[str], describe: Callable[[str], None]
) -> GoodputPlan:
    """Raises TraceError or ConfigError.

    options: one trace, number and lengths of its requests; its cells are not looked at
    cell_names: empty = the default cells; describe: says what is simulated
    """
    window = take_window(options, options.traces[0], 0)
    guess = Guess(window, options.platform, describe)
    cells = [_parse_cell(name) for name in cell_names] or _default_cells(
        guess, options.length_scale
    )
    return GoodputPlan(
        options.platform,
        window,
        num_blocks,
        {cell: guess.loads(cell) for cell in cells},
        frozenset(c for c in cells if not c.granularity.startswith("chunk")),
        frozenset(c for c in cells if c.policy == "s-edf"),
        options.length_scale,
    )


def common_chunk(length_scale: float) -> str:
    """The granularity that stands for chunks of COMMON_CHUNK."""
    return _chunk(COMMON_CHUNK, length_scale)


def _default_cells(guess: Guess, length_scale: float) -> list[Cell]:
    """First come first served, and each policy at tile, at its best chunks and the common one."""
    cells = [_parse_cell(BASELINE)]
    for policy, num_chunks in POLICY_CHUNKS.items():
        chunks = [Cell(policy, _chunk(size, length_scale)) for size in CHUNK_SIZES]
        chunks.sort(key=lambda cell: -guess.loads(cell)[0])
        common = Cell(policy, common_chunk(length_scale))
        cells += dict.fromkeys([Cell(policy, "tile"), *chunks[:num_chunks], common])
    return cells


def _chunk(full_size: int, length_scale: float) -> str:
    return f"chunk:{max(1, round(full_size * length_scale))}"


def _parse_cell(name: str) -> Cell:
    cell = Cell.parse(name)
    if cell.policy not in POLICIES:
        raise ConfigError(f"cell {name!r}: the policy must be one of {', '.join(POLICIES)}")
    Granularity.parse(cell.granularity)
    return cell


class Guess:
    """Highest loads by simulation."""

    def __init__(self, window: Window, platform: Platform, describe: Callable[[str], None]) -> None:
        self._window = window
        self._platform = platform
        self._describe = describe
        self._loads: dict[Cell, tuple[float, float]] = {}

    def loads(self, cell: Cell) -> tuple[float, float]:
        """Overall, and with every class."""
        if cell not in self._loads:
            self._describe(f"simulating {cell.name}")
            found: dict[float, tuple[float, float]] = {}
            self._loads[cell] = self._highest(cell, found, 0), self._highest(cell, found, 1)
        return self._loads[cell]

    def _highest(self, cell: Cell, found: dict[float, tuple[float, float]], measure: int) -> float:
        """found: attainments by load, which both measures share."""
        curve: dict[float, float] = {}

        def measure_at(load: float) -> None:
            if load not in found:
                found[load] = self._attainments(cell, load)
            curve[load] = found[load][measure]

        search(measure_at, lambda: curve, snap(1.0), TARGET)
        return crossing(curve, TARGET)

    def _attainments(self, cell: Cell, load: float) -> tuple[float, float]:
        """Of all requests, and of the class that fares worst."""
        setup = Setup(cell.policy, Granularity.parse(cell.granularity), 0.0, 0, self._platform)
        requests = at_load(self._window.requests, load, self._platform)
        replay = Replay(requests, setup, objectives=self._window.objectives).run_all()
        return replay.attainment, min(replay.attainment_by_class.values())
