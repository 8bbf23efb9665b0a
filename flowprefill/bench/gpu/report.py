"""Tables and bars of `bench gpu-bench`, from the figures of its JSON object. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowprefill.bench import blocking, prefill
from flowprefill.bench.bars import Bar
from flowprefill.replay.summary import send_lag_text

if TYPE_CHECKING:
    from rich.table import Table

MAX_BLOCKING_MS = 1.5
MIN_SLICED_RATIO = 0.99
MIN_REFERENCE_RATIO = 0.9
MAX_PARKED_SHARE = 0.05
DRY_RUN = "DRY RUN on a CPU with a tiny model: nothing was measured on a GPU"
Figures = Mapping[str, Any]


def find_bars(figures: Mapping[str, Figures], longest: int, is_dry_run: bool) -> list[Bar]:
    """Those of the stages that gave figures; of a dry run none is held to anything.

    figures: by stage; longest: tokens of the prompt that blocking and slicing are judged at
    """
    found: list[Bar] = []
    key = str(longest)

    def add(what: str, measured: float, limit: float, unit: str, is_floor: bool = False) -> None:
        found.append(Bar(what, measured, None if is_dry_run else limit, unit, is_floor))

    tile = figures.get("blocking", {}).get("tile", {})
    if key in tile:
        what = f"blocking time at tile, {key} tokens, p99"
        add(what, tile[key]["p99_ms"], MAX_BLOCKING_MS, "ms")
    measured = figures.get("prefill", {})
    if key in measured.get("sliced_ratio", {}):
        what = f"sliced prefill over the faster of the others, {key} tokens"
        add(what, measured["sliced_ratio"][key], MIN_SLICED_RATIO, "", is_floor=True)
    for name, ratios in measured.get("peer_ratio", {}).items():
        for length, ratio in ratios.items():
            what = f"prefill over {name}, {length} tokens"
            add(what, ratio[0], MIN_REFERENCE_RATIO, "", is_floor=True)
    parked = figures.get("parked", {})
    if "tile" in parked:
        what = f"{parked['num_parked']} parked prefills over weights and their KV"
        add(what, parked["tile"]["share"], MAX_PARKED_SHARE, "")
    return found


def make_tables(figures: Mapping[str, Figures]) -> list[Table]:
    """One of each stage that has figures."""
    tables = []
    if figures.get("prefill"):
        tables.append(prefill.make_table(figures["prefill"]))
    if figures.get("blocking"):
        tables.append(blocking.make_table(dict(figures["blocking"])))
    if figures.get("decode"):
        tables.append(_decode_table(figures["decode"]))
    if figures.get("parked"):
        tables.append(_parked_table(figures["parked"]))
    if figures.get("goodput"):
        tables.append(_goodput_table(figures["goodput"]))
    return tables


def _decode_table(figures: Figures) -> Table:
    from rich.table import Table

    table = Table("streams", title="Decoding together")
    for heading in ("tokens/s together", "ms per step", "p99", "steps"):
        table.add_column(heading, justify="right")
    for key, rate in figures["tokens_per_s"].items():
        times = (f"{figures[name][key]:.3f}" for name in ("step_ms", "step_p99_ms"))
        table.add_row(key, f"{rate:,.1f}", *times, str(figures["num_steps"][key]))
    return table


def _parked_table(figures: Figures) -> Table:
    from rich.table import Table

    count, tokens = figures["num_parked"], figures["num_tokens"]
    table = Table("granularity", title=f"{count} parked prefills of {tokens} tokens")
    for heading in ("live MB each", "on the card, MB each", "of weights and their KV"):
        table.add_column(heading, justify="right")
    for name in ("tile", "op"):
        one = figures[name]
        allocated = one["allocated_bytes_each"]
        shown = "" if allocated is None else f"{allocated / 1e6:,.2f}"
        table.add_row(name, f"{one['live_bytes_each'] / 1e6:,.2f}", shown, f"{one['share']:.2%}")
    return table


def _goodput_table(figures: Figures) -> Table:
    from rich.table import Table

    title = (
        f"{figures['num_requests']} requests of {figures['trace']} at load {figures['load']:g}, "
        f"{figures['offered_per_s']:g} a second"
    )
    table = Table("policy/granularity", title=title)
    headings = (
        "on time",
        "worst class",
        "on time per s",
        "TTFT p50, ms",
        "p99",
        "blocking p99, ms",
        "send lag p99",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, one in figures["cells"].items():
        blocked = one["blocking_p99_ms"]
        table.add_row(
            name,
            f"{one['attainment']:.1%}",
            f"{one['worst_class_attainment']:.1%}",
            f"{one['goodput_per_s']:.2f}",
            f"{one['ttft_p50_ms']:,.1f}",
            f"{one['ttft_p99_ms']:,.1f}",
            "" if blocked is None else f"{blocked:.3f}",
            send_lag_text(one["send_lag_p99_ms"], one["void"]),
        )
    return table
