"""`flowprefill simulate`: what it prints, what it refuses, and the arithmetic of its intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench.simulate_plan import take_window
from flowprefill.bench.simulate_table import (
    MEASURES,
    Cell,
    Plan,
    differences,
    measure_cell,
    paired_interval,
)
from flowprefill.cli import app
from flowprefill.errors import ConfigError, FlowPrefillError
from flowprefill.granularity import Granularity
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.workload import TraceError

TRACES = Path(__file__).parents[3] / "clients" / "traces"
QWEN = TRACES / "qwentrace_like_synthetic_10min.csv"
AZURE = TRACES / "azure2023_mixed_20min.csv"


def simulate(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_run_prints_attainment_by_class_and_counts() -> None:
    result = simulate("--trace", QWEN, "--requests", 200, "--policies", "fcfs,s-edf")
    fcfs, sedf = result["runs"]
    assert (fcfs["policy"], sedf["policy"]) == ("fcfs", "s-edf")
    assert fcfs["preemptions"] == 0 < sedf["preemptions"]
    assert fcfs["attainment"] < sedf["attainment"]
    for run in (fcfs, sedf):
        assert run["granularity"] == "tile"
        weighted = sum(
            run["requests_by_class"][name] * share
            for name, share in run["attainment_by_class"].items()
        )
        assert weighted / 200 == pytest.approx(run["attainment"], abs=1e-3)
        assert run["ttft_p50_s"] <= run["ttft_p90_s"] <= run["ttft_p99_s"]
    assert result["run"]["device"] == "A800-80GB, simulated"


def test_a_run_with_output_tokens_decodes() -> None:
    arguments = ("--trace", AZURE, "--requests", 60, "--output-tokens", 20, "--load", 0.4)
    (run,) = simulate(*arguments)["runs"]
    assert run["decode_steps"] > 0
    assert 0.9 < run["tbt_attainment"] <= 1


def test_a_table_compares_all_cells_and_writes_its_line(tmp_path: Path) -> None:
    json_out = tmp_path / "table.json"
    arguments = ["--table", "--trace", QWEN, "--trace", AZURE, "--requests", 80, "--seeds", 2]
    arguments += ["--policies", "fcfs,s-edf", "--granularities", "whole,chunk:512,op"]
    result = simulate(*arguments, "--json-out", json_out)
    assert json.loads(json_out.read_text()) == result
    kinds = {"whole", "chunk:512", "op"}
    for found in (result, *result["traces"].values()):
        for measure in MEASURES:
            assert found[measure].keys() == {"fcfs", "s-edf"}
            assert all(by_kind.keys() == kinds for by_kind in found[measure].values())
            assert all(0 < v < math.inf for row in found[measure].values() for v in row.values())
        for policy in ("fcfs", "s-edf"):
            for kind in kinds:
                overall = found["max_load_90"][policy][kind]
                assert found["max_load_90_every_class"][policy][kind] <= overall
    assert result["traces"].keys() == {QWEN.stem, AZURE.stem}
    mean = sum(t["max_load_90"]["s-edf"]["op"] for t in result["traces"].values()) / 2
    assert result["max_load_90"]["s-edf"]["op"] == pytest.approx(mean, abs=1e-3)
    interval = result["intervals"]["max_load_90"]["s-edf"]["op"]
    assert interval["best_chunk"] == "chunk:512"
    low, high = interval["vs_fcfs_whole"][1:]
    gain = result["max_load_90"]["s-edf"]["op"] - result["max_load_90"]["fcfs"]["whole"]
    assert 0 < low <= gain <= high
    fractions = result["offline_bound_fraction"]
    assert fractions["fcfs"]["whole"] < fractions["s-edf"]["op"] <= 1
    highest = max(max(by_kind.values()) for by_kind in result["max_load_90"].values())
    assert highest <= result["max_load_90_offline_bound"] < 4 * highest
    # A cell by itself, in this process, is what the table's processes found.
    plan = Plan((QWEN, AZURE), ("fcfs",), ("op",), 2, 80, 0.2, 1, 0.7)
    alone = [measure_cell(plan, Cell(QWEN, seed, "fcfs", "op")) for seed in (0, 1)]
    mean = sum(found.max_load_90 for found in alone) / 2
    assert result["traces"][QWEN.stem]["max_load_90"]["fcfs"]["op"] == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--policies", "lifo"], ConfigError, "policy 'lifo'"),
        (["--granularities", "chunk"], ConfigError, "granularity='chunk'"),
        (["--requests", "4000"], TraceError, "of a trace of 3622 requests"),
        (["--trace", str(QWEN)], ConfigError, "given twice"),
        (["--trace", "none.csv"], TraceError, "none.csv: no such trace"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_run(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        simulate("--trace", QWEN, "--table", *arguments)


def test_an_interval_holds_the_mean_and_needs_two_windows() -> None:
    assert paired_interval([1.5, 2.5, 3.5], [1.0, 2.0, 3.0]) == [0.5, 0.5, 0.5]
    values = [1.0, 2.0, 1.5, 3.0, 2.2, 1.1]
    found = paired_interval(values, [1.0] * 6)
    assert found is not None
    mean, low, high = found
    assert mean == pytest.approx(sum(values) / 6 - 1)
    assert min(values) - 1 < low < mean < high < max(values) - 1
    assert paired_interval([1.0], [0.5]) is None


def test_pairs_of_equal_noise_give_a_narrow_interval() -> None:
    noise = [0.0, 5.0, -3.0, 8.0, 1.0]
    found = paired_interval([n + 0.1 for n in noise], noise)
    assert found == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize(("less_is_better", "best"), [(False, "chunk:512"), (True, "chunk:1024")])
def test_cells_are_compared_with_the_best_chunk_of_their_policy(
    less_is_better: bool, best: str
) -> None:
    values = {
        "fcfs": {"whole": [1.0, 1.0], "op": [1.0, 1.0]},
        "edf": {"chunk:512": [2.0, 4.0], "chunk:1024": [1.0, 3.0], "op": [3.0, 5.0]},
    }
    found = differences(values, less_is_better)
    assert found["edf"]["op"]["best_chunk"] == best
    gain = 2.0 if less_is_better else 1.0
    assert found["edf"]["op"]["vs_best_chunk"] == [gain, gain, gain]
    assert found["edf"]["op"]["vs_fcfs_whole"][0] == 3.0
    assert found["fcfs"]["op"]["vs_best_chunk"] is None
    assert found["fcfs"]["op"]["vs_fcfs_whole"] == [0.0, 0.0, 0.0]
    assert differences({"edf": {"op": [1.0, 2.0]}}, False)["edf"]["op"]["vs_fcfs_whole"] is None


def test_a_run_is_held_against_what_no_schedule_can_exceed() -> None:
    arguments = ("--trace", QWEN, "--requests", 200, "--policies", "fcfs,goodput", "--load", 1.5)
    fcfs, goodput = simulate(*arguments)["runs"]
    assert fcfs["offline_bound"] == goodput["offline_bound"] < 200
    for run in (fcfs, goodput):
        on_time = run["attainment"] * 200
        assert run["offline_bound_fraction"] == pytest.approx(
            on_time / run["offline_bound"], abs=1e-3
        )
    assert fcfs["offline_bound_fraction"] < 0.5 < 0.85 < goodput["offline_bound_fraction"] <= 1


def test_a_timeline_is_of_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    arguments = ("--trace", QWEN, "--requests", 30, "--policies", "s-edf,fcfs", "--load", 1)
    sedf, _ = simulate(*arguments, "--timeline", path)["runs"]
    trace = json.loads(path.read_text())
    assert trace["otherData"]["policy"] == "s-edf"
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    on_time = [e["name"] for e in bars if "on_time" in e["args"]]
    assert len(on_time) == 30
    assert on_time.count("on time") == round(sedf["attainment"] * 30)


@pytest.mark.parametrize("mode", ["--timeline", "--plots"])
def test_a_trace_is_not_repeated_where_it_cannot_be(tmp_path: Path, mode: str) -> None:
    trace, out = tmp_path / "short.csv", tmp_path / "out"
    trace.write_text("arrival_s,type,input_tokens,output_tokens\n0,text,50,1\n1,text,60,1\n")
    arguments = ("--trace", str(trace), "--requests", "3", mode, str(out))
    run = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(run.exception, TraceError)
    assert not run.stdout and not out.exists()  # nothing was run whose figures would be lost
    assert simulate("--trace", trace, "--requests", 3)["num_requests"] == 3


def test_other_seeds_are_other_prediction_errors() -> None:
    """And the seed is in the line."""
    arguments = ("--trace", QWEN, "--requests", 200, "--load", 1.2, "--error", 0.9, "--seed")
    results = [simulate(*arguments, seed) for seed in (0, 7, 7)]
    assert [result["run"]["seed"] for result in results] == [0, 7, 7]
    means = [result["runs"][0]["ttft_mean_s"] for result in results]
    assert means[0] != means[1] == means[2]


def test_no_two_windows_of_any_seeds_have_the_same_errors() -> None:
    plans = [Plan((QWEN,), (), (), 3, 80, 0.2, 1, 0.7, seed=seed) for seed in range(3)]
    seeds = [plan.error_seed(window) for plan in plans for window in range(plan.num_seeds)]
    assert seeds == list(range(9))


def test_plots_are_drawn_of_the_chosen_cells(tmp_path: Path) -> None:
    arguments = ["--trace", QWEN, "--requests", 40, "--seeds", 2, "--plots", tmp_path / "plots"]
    arguments += ["--policies", "fcfs,goodput", "--granularities", "tile", "--output-tokens", 1]
    result = simulate(*arguments)
    found = result["traces"][QWEN.stem]
    assert found["pictures"] == [
        f"{QWEN.stem}_{name}.png" for name in ("rate", "slo_scale", "ttft")
    ]
    assert sorted(found["pictures"]) == sorted(p.name for p in (tmp_path / "plots").iterdir())
    by_load = found["attainment_by_load"]
    assert by_load.keys() == {"fcfs/tile", "goodput/tile"}
    for shares, loads in ((by_load, "loads"), (found["attainment_by_slo_scale"], "slo_scales")):
        assert all(len(values) == len(result[loads]) for values in shares.values())
    # The last load and the last scale, by the commands that run them alone.
    alone = [
        Replay(
            at_load(take_window(plan, QWEN, seed).requests, result["loads"][-1]),
            Setup("fcfs", Granularity("tile"), 0.2, seed),
        ).run_all()
        for plan in [Plan((QWEN,), ("fcfs",), ("tile",), 2, 40, 0.2, 1, 0.7)]
        for seed in (0, 1)
    ]
    mean = sum(replay.attainment for replay in alone) / 2
    assert by_load["fcfs/tile"][-1] == pytest.approx(mean, abs=1e-4)
    for name, bound in (
        ("attainment_by_load", "offline_bound_by_load"),
        ("attainment_by_slo_scale", "offline_bound_by_slo_scale"),
    ):
        for values in found[name].values():
            assert all(a <= b + 1e-9 for a, b in zip(values, found[bound], strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plots", "pictures", "--table"], "--plots has runs of its own"),
        (["--timeline", "t.json", "--replicas", "2"], "--timeline is of one run"),
        (["--plots", str(QWEN)], "is no folder"),
    ],
)
def test_modes_that_exclude_each_other_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(FlowPrefillError, match=message):
        simulate("--trace", QWEN, *arguments)
