"""What `flowprefill bench goodput` measures: requests with objectives, cells, and where to look.

The same requests are simulated on this device's profile first: that says which chunk size of a
policy is worth measuring, and near which load to begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from flowprefill.workload import (
    Objective,
    TraceRequest,
    clip_lengths,
    read_trace,
    scale_lengths,
)

T = TypeVar("T")

POLICY_CHUNKS = {"s-edf": 1, "goodput": 2, "srpt": 1}
"""Policies that are measured, and at how many of their chunk sizes, the best ones by simulation."""
MIN_REQUESTS = 60
"""Fewer would be served after the last arrival, waiting for nobody."""


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
    tightness_guesses: Mapping[Cell, float]
    """Those of which the tightest objectives are searched; by how much they are expected to be
    tighter than the usual ones."""
    length_scale: float

    @property
    def rate_at_load_1(self) -> float:
        """Requests per second."""
        return rate_at_load_1(self.window.requests, self.platform)

    def offered(
        self, load: float, slo_scale: float = 1.0, slowdown: float = 1.0
    ) -> tuple[list[TraceRequest], list[Objective]]:
        """The requests at that load, and their objectives times slo_scale.

        slowdown: of the device against its profile; all times are in its own seconds
        """
        requests = at_load(self.window.requests, load / slowdown, self.platform)
        objectives = [
            replace(o, ttft_s=o.ttft_s * slo_scale * slowdown, tbt_s=o.tbt_s * slowdown)
            for o in self.window.objectives
        ]
        return requests, objectives

    def offline_bound(self, load: float, slo_scale: float = 1.0) -> int | None:
        """How many of them any schedule can serve in time at most; None: nobody knows."""
        requests, objectives = self.offered(load, slo_scale)
        arrivals = arrivals_of(requests, objectives, self.platform.block_tokens)
        return offline_bound_on(self.platform, arrivals)

    @property
    def scale(self) -> str:
        """What loads and objectives mean here: another machine or profile changes it."""
        total_s = sum(goal.ttft_s for goal in self.window.objectives)
        device = self.platform.device_name
        return f"{device}, {self.rate_at_load_1:.6g} requests/s, objectives {total_s:.6g} s"

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
    check_blocks(options.num_requests, num_blocks)
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
        frozenset(filter(_is_never_chunked, cells)),
        {cell: guess.tightness(cell, options.load) for cell in cells if is_tightened(cell)},
        options.length_scale,
    )


def check_blocks(num_requests: int, num_blocks: int) -> None:
    """Raises ConfigError for a block of no requests: there is nothing to say of it."""
    if num_requests < num_blocks:
        raise ConfigError(f"--blocks {num_blocks}: there are {num_requests} requests to divide")


def is_tightened(cell: Cell) -> bool:
    """Whether its tightest objectives are searched."""
    return cell.policy == "s-edf"


def requests_within(
    seconds: float, trace: Path, platform: Platform, length_scale: float, num_replays: int
) -> int:
    """How many requests of a trace can be replayed so many times, the device being busy."""
    requests = clip_lengths(scale_lengths(read_trace(trace), length_scale), platform.max_tokens, 1)
    cost = platform.cost(Granularity("tile"))
    mean_s = sum(cost.prefill_s(request.input_tokens) for request in requests) / len(requests)
    return max(MIN_REQUESTS, min(len(requests), int(seconds / num_replays / mean_s)))


def num_searches(cell_names: Sequence[str]) -> int:
    """Of highest loads and tightest objectives; cell_names: as of make_plan."""
    names = list(cell_names) or [BASELINE]
    if not cell_names:
        for policy, num_chunks in POLICY_CHUNKS.items():  # the common one beside the best
            names += [f"{policy}/tile", *[f"{policy}/chunk:1"] * (num_chunks + 1)]
    cells = [_parse_cell(name) for name in names]
    return sum(1 + _is_never_chunked(cell) + is_tightened(cell) for cell in cells)


def _is_never_chunked(cell: Cell) -> bool:
    return not cell.granularity.startswith("chunk")


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
    """Highest loads and tightest objectives by simulation."""

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

    def tightness(self, cell: Cell, load: float) -> float:
        """By how much objectives may be tighter at that load."""
        curve: dict[float, float] = {}

        def measure_at(tightness: float) -> None:
            curve[tightness], _ = self._attainments(cell, load, 1 / tightness)

        search(measure_at, lambda: curve, snap(1.0), TARGET)
        return crossing(curve, TARGET)

    def _highest(self, cell: Cell, found: dict[float, tuple[float, float]], measure: int) -> float:
        """found: attainments by load, which both measures share."""
        curve: dict[float, float] = {}

        def measure_at(load: float) -> None:
            if load not in found:
                found[load] = self._attainments(cell, load)
            curve[load] = found[load][measure]

        search(measure_at, lambda: curve, snap(1.0), TARGET)
        return crossing(curve, TARGET)

    def _attainments(self, cell: Cell, load: float, slo_scale: float = 1.0) -> tuple[float, float]:
        """Of all requests, and of the class that fares worst."""
        setup = Setup(cell.policy, Granularity.parse(cell.granularity), 0.0, 0, self._platform)
        requests = at_load(self._window.requests, load, self._platform)
        replay = Replay(requests, setup, slo_scale, objectives=self._window.objectives).run_all()
        return replay.attainment, min(replay.attainment_by_class.values())
