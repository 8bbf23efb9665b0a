"""What `flowprefill bench servers` reports: highest loads side by side, their ratios, and a short
prompt behind a long one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from flowprefill.bench.goodput_outcomes import (
    CellResult,
    Measure,
    Outcome,
    attainment,
    ttft_by_class,
    worst_class_attainment,
)
from flowprefill.bench.goodput_plan import GoodputPlan
from flowprefill.bench.goodput_report import (
    class_objectives,
    interval,
    load_points,
    max_load,
    points_table,
    ratio_of,
    scaled,
    send_lags,
    with_interval,
)
from flowprefill.bench.server_runs import LONG_TOKENS, MOMENTS, SHORT_TOKENS
from flowprefill.replay.summary import send_lag_text

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Results:
    """Everything that was measured, by name of server or engine."""

    by_name: dict[str, CellResult]
    encounters: dict[str, list[Outcome]]
    """Of a short prompt behind a long one, see ServerRuns.meet; empty where not asked for."""
    versions: dict[str, str]
    """Of servers that were started."""


def summarise(
    plan: GoodputPlan, results: Results, ours: Sequence[str], peers: Sequence[str], seed: int
) -> dict[str, Any]:
    """The JSON object. Rates are requests per second; ratios are of ours to each peer.

    ours, peers: their names
    """

    def loads(measure_of: Measure) -> dict[str, list[float]]:
        return {
            name: with_interval(max_load(result, measure_of), plan.num_blocks, seed)
            for name, result in results.by_name.items()
        }

    def ratios(measure_of: Measure) -> dict[str, dict[str, list[float]]]:
        highest = {name: max_load(result, measure_of) for name, result in results.by_name.items()}
        return {
            name: {
                peer: with_interval(ratio_of(highest[name], highest[peer]), plan.num_blocks, seed)
                for peer in peers
            }
            for name in ours
        }

    overall, every_class = loads(attainment), loads(worst_class_attainment)
    rate = plan.rate_at_load_1
    lags = {name: send_lags([result]) for name, result in results.by_name.items()}
    return {
        "max_load_90": overall,
        "max_rate_90": {name: scaled(values, rate) for name, values in overall.items()},
        "max_load_90_every_class": every_class,
        "max_rate_90_every_class": {n: scaled(v, rate) for n, v in every_class.items()},
        "ratio": ratios(attainment),
        "ratio_every_class": ratios(worst_class_attainment),
        "short_behind_long": {n: _meeting(rounds) for n, rounds in results.encounters.items()},
        "cells": {name: load_points(result) for name, result in results.by_name.items()},
        "objectives_s": class_objectives(plan),
        "send_lag_p99_ms": {name: lag["send_lag_p99_ms"] for name, lag in lags.items()},
        "void": [name for name, lag in lags.items() if lag["void"]],
        "versions": results.versions,
    }


def _meeting(rounds: Sequence[Outcome]) -> dict[str, Any]:
    """TTFTs in seconds, of the classes of ServerRuns.meet."""
    return {
        name: {"p50": round(median(values), 4), "max": round(max(values), 4)}
        for name, values in ttft_by_class(rounds).items()
    }


def make_tables(plan: GoodputPlan, result: Mapping[str, Any]) -> list[Table]:
    """Highest loads with ratios, what was measured at each load, and short behind long."""
    tables = [_loads_table(plan, result)]
    if result["short_behind_long"]:
        tables.append(_meeting_table(result["short_behind_long"]))
    return [*tables, points_table(result["cells"]), _both_ends_table(result["cells"])]


def _loads_table(plan: GoodputPlan, result: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Highest load with 90% on time [95% interval]; requests/s in brackets")
    table.add_column("server")
    for heading in ("all requests", "every class", "send lag p99"):
        table.add_column(heading, justify="right")
    for name in result["ratio"]:
        table.add_column(f"{name} / it", justify="right")
    for name, load in result["max_load_90"].items():
        ratios = [by_peer.get(name) for by_peer in result["ratio"].values()]
        table.add_row(
            name,
            f"{interval(load)} ({result['max_rate_90'][name][0]:.1f}/s)",
            interval(result["max_load_90_every_class"][name]),
            send_lag_text(result["send_lag_p99_ms"][name], name in result["void"]),
            *(interval(ratio) if ratio else "" for ratio in ratios),
        )
    return table


def _meeting_table(meetings: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=f"TTFT in seconds, median (worst): {SHORT_TOKENS} tokens behind {LONG_TOKENS}"
    )
    table.add_column("server")
    classes = ["short alone", *(f"short at {m:.0%}" for m in MOMENTS), "long alone"]
    classes += [f"long at {m:.0%}" for m in MOMENTS]
    for name in classes:
        table.add_column(name, justify="right")
    for server, ttfts in meetings.items():
        cells = (f"{ttfts[name]['p50']:.3f} ({ttfts[name]['max']:.3f})" for name in classes)
        table.add_row(server, *cells)
    return table


def _both_ends_table(cells: Mapping[str, Any]) -> Table:
    """Of servers that tell their own TTFT."""
    from rich.table import Table

    table = Table(title="TTFT in seconds at both ends, p50 / p99")
    for heading in ("server", "load", "at the client", "at the server", "between"):
        table.add_column(heading)
    ends = ("ttft_s", "server_ttft_s", "ttft_outside_server_s")
    for name, rows in cells.items():
        for row in (row for row in rows if row["server_ttft_s"]):
            values = (f"{row[end]['p50']:.4f} / {row[end]['p99']:.4f}" for end in ends)
            table.add_row(name, f"{row['load']:.3g}", *values)
    return table
