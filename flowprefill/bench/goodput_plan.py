"""What `flowprefill bench goodput` measures: windows with objectives, cells, and where to look.

The windows are also simulated at their full lengths on the paper's device (simulator/replay.py):
that says which chunk size of a policy is worth measuring, and near which load to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from flowprefill.bench.goodput_runs import Cell, Window
from flowprefill.bench.objectives import ClassScale, SoloSeconds, class_scales, scaled_objectives
from flowprefill.config import POLICIES
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.simulator.measures import max_loads
from flowprefill.simulator.replay import Setup
from flowprefill.workload import (
    TraceError,
    TraceRequest,
    clip_lengths,
    read_trace,
    scale_lengths,
    scale_rate,
    spread_ticks,
    window,
)

FULL_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
"""Chunk sizes at the trace's own lengths."""
COMMON_CHUNK = 2048
"""What a server is most often set to."""
BASELINE = "fcfs/whole"
_POLICIES = {"s-edf": 1, "goodput": 2, "srpt": 1}
"""Those that are measured, and at how many of their chunk sizes, the best ones by simulation."""
_PREDICTION_ERROR = 0.1
"""Of the simulations."""


@dataclass(frozen=True)
class GoodputPlan:
    """Everything that is decided before the first engine is started."""

    windows: Sequence[Window]
    guesses: dict[Cell, tuple[float, float]]
    """Cells, and the loads expected to be their highest: overall, and with every class."""
    every_class_cells: frozenset[Cell]
    """Those of which the load with 90% of every class is searched."""
    tightness_cells: frozenset[Cell]
    """Those of which the tightest objectives are searched."""
    scales: dict[str, ClassScale]
    rate_at_load_1: float
    """Requests per second, mean of the windows."""
    length_scale: float
    facts: dict[str, Any]
    """For the JSON line."""


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose."""

    trace: Path
    num_windows: int
    num_requests: int
    length_scale: float
    output_tokens: int


def make_plan(
    options: PlanOptions,
    cell_names: Sequence[str],
    solo_s: SoloSeconds,
    max_input_tokens: int,
    describe: Callable[[str], None],
) -> GoodputPlan:
    """Raises TraceError or ConfigError.

    cell_names: empty = the default cells
    solo_s: TTFT of a prompt alone on our device; describe: says what is simulated
    """
    length_scale, num_requests = options.length_scale, options.num_requests
    recorded = spread_ticks(read_trace(options.trace))
    scales = class_scales(recorded, length_scale, solo_s)
    starts = _starts(len(recorded), options.num_windows, num_requests)
    full = [window(recorded, start, num_requests) for start in starts]
    windows = [_make_window(w, options, scales, solo_s, max_input_tokens) for w in full]
    guess = _Guess(full, length_scale, describe)
    cells = [_parse_cell(name) for name in cell_names] or _default_cells(guess, length_scale)
    rates = [len(w.requests) / w.requests[-1].arrival_s for w in windows]
    return GoodputPlan(
        windows,
        {cell: guess.loads(cell) for cell in cells},
        frozenset(c for c in cells if not c.granularity.startswith("chunk")),
        frozenset(c for c in cells if c.policy == "s-edf"),
        scales,
        mean(rates),
        length_scale,
        {**asdict(options), "trace": options.trace.name},
    )


def _default_cells(guess: _Guess, length_scale: float) -> list[Cell]:
    """First come first served, and each policy at tile, at its best chunks and the common one."""
    cells = [_parse_cell(BASELINE)]
    for policy, num_chunks in _POLICIES.items():
        chunks = [Cell(policy, _chunk(size, length_scale)) for size in FULL_CHUNKS]
        chunks.sort(key=lambda cell: -guess.loads(cell)[0])
        common = Cell(policy, common_chunk(length_scale))
        cells += dict.fromkeys([Cell(policy, "tile"), *chunks[:num_chunks], common])
    return cells


def common_chunk(length_scale: float) -> str:
    """The granularity that stands for chunks of COMMON_CHUNK."""
    return _chunk(COMMON_CHUNK, length_scale)


def _chunk(full_size: int, length_scale: float) -> str:
    return f"chunk:{max(1, round(full_size * length_scale))}"


def _parse_cell(name: str) -> Cell:
    cell = Cell.parse(name)
    if cell.policy not in POLICIES:
        raise ConfigError(f"cell {name!r}: the policy must be one of {', '.join(POLICIES)}")
    Granularity.parse(cell.granularity)
    return cell


def _starts(num_recorded: int, num_windows: int, num_requests: int) -> list[int]:
    """First requests of windows that are spread evenly over the trace."""
    last = num_recorded - num_requests
    if last < 0:
        raise TraceError(f"a trace of {num_recorded} requests has no window of {num_requests}")
    return [round(i * last / max(1, num_windows - 1)) for i in range(num_windows)]


def _make_window(
    requests: Sequence[TraceRequest],
    options: PlanOptions,
    scales: dict[str, ClassScale],
    solo_s: SoloSeconds,
    max_input_tokens: int,
) -> Window:
    goals = scaled_objectives(requests, scales)
    short = [
        replace(request, output_tokens=options.output_tokens)
        for request in clip_lengths(
            scale_lengths(requests, options.length_scale), max_input_tokens, 1
        )
    ]
    work_s = sum(solo_s(r.input_tokens) for r in short)
    return Window(scale_rate(short, short[-1].arrival_s / work_s), goals)


class _Guess:
    """Highest loads by simulation of the windows at full length."""

    def __init__(
        self,
        windows: Sequence[Sequence[TraceRequest]],
        length_scale: float,
        describe: Callable[[str], None],
    ) -> None:
        self._windows = windows
        self._length_scale = length_scale
        self._describe = describe
        self._loads: dict[Cell, tuple[float, float]] = {}

    def loads(self, cell: Cell) -> tuple[float, float]:
        """Medians over the windows: overall, and with every class."""
        if cell not in self._loads:
            self._describe(f"simulating {cell.name}")
            granularity = Granularity.parse(cell.granularity)
            if granularity.kind == "chunk":
                full_size = round(granularity.chunk_tokens / self._length_scale)
                granularity = Granularity.parse(f"chunk:{full_size}")
            setup = Setup(cell.policy, granularity, _PREDICTION_ERROR)
            found = [max_loads(requests, setup) for requests in self._windows]
            self._loads[cell] = median(a for a, _ in found), median(b for _, b in found)
        return self._loads[cell]
