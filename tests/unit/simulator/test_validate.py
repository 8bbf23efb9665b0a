"""`simulate --validate`: its arithmetic, and a small comparison on a real engine."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench.report import VOID_EXIT_CODE
from flowprefill.bench.simulate_validate import (
    Calibration,
    Comparison,
    Outcome,
    fit_calibration,
    make_table,
    summarise,
)
from flowprefill.cli import app
from flowprefill.errors import ConfigError
from flowprefill.replay import records
from flowprefill.workload import TraceError
from tests.factories import write_tiny_model


def outcome(attainment: float, mean_ttft_s: float) -> Outcome:
    return Outcome(attainment, mean_ttft_s, 0.1, 0.3, 2)


def comparison(engine: Outcome, simulator: Outcome, lag_s: float = 0.001) -> Comparison:
    return Comparison("azure", "s-edf", "tile", 0.5, 100, engine, simulator, 1.0, lag_s)


def test_errors_are_points_of_attainment_and_shares_of_mean_ttft() -> None:
    found = comparison(outcome(0.90, 0.200), outcome(0.93, 0.180))
    assert found.attainment_error_points == pytest.approx(3.0)
    assert found.mean_ttft_error == pytest.approx(-0.1)


def test_the_worst_of_all_comparisons_counts_whatever_its_sign() -> None:
    found = [
        comparison(outcome(0.90, 0.200), outcome(0.93, 0.205)),
        comparison(outcome(0.90, 0.200), outcome(0.86, 0.210)),
        comparison(outcome(0.90, 0.200), outcome(0.90, 0.150)),
    ]
    result = summarise(found, [Calibration(1.0, 0.0)])
    assert result["attainment_error_points"] == 4.0
    assert result["mean_ttft_error"] == 0.25
    assert [c["attainment_error_points"] for c in result["cells"]] == [3.0, -4.0, 0.0]
    assert [c["mean_ttft_error"] for c in result["cells"]] == [0.025, 0.05, -0.25]
    assert result["void"] is False


def test_requests_that_were_sent_late_make_it_void() -> None:
    late = comparison(outcome(1, 1), outcome(1, 1), lag_s=0.006)
    assert summarise([late], [])["void"] is True
    assert list(make_table([late]).columns[-1].cells) == ["6.0 ms, void"]


def test_outcomes_are_of_all_requests() -> None:
    found = Outcome.of(0.5, [0.1, 0.2, 0.6], 4)
    assert found.mean_ttft_s == pytest.approx(0.3)
    assert (found.ttft_p50_s, found.num_preemptions) == (0.2, 4)
    assert 0.2 < found.ttft_p99_s <= 0.6


@pytest.mark.parametrize(("slowness", "overhead_s"), [(1.0, 0.0), (1.3, 0.002), (0.9, 0.0005)])
def test_calibration_finds_slowness_and_overhead(slowness: float, overhead_s: float) -> None:
    profiled = [0.003, 0.01, 0.03, 0.1, 0.5]
    found = fit_calibration(profiled, [slowness * s + overhead_s for s in profiled])
    assert found.slowness == pytest.approx(slowness)
    assert found.overhead_s == pytest.approx(overhead_s, abs=1e-9)


def test_calibration_takes_no_negative_overhead() -> None:
    draw = random.Random(0)
    profiled = [0.003, 0.01, 0.03, 0.1, 0.5]
    measured = [1.2 * s * draw.uniform(0.98, 1.02) - 0.0005 for s in profiled]
    found = fit_calibration(profiled, measured)
    assert found.overhead_s == 0
    assert found.slowness == pytest.approx(1.15, abs=0.06)


def test_calibration_by_nothing_but_noise_is_still_a_speed() -> None:
    found = fit_calibration([0.001, 0.002, 0.003], [0.009, 0.007, 0.005])
    assert found.slowness > 0 and found.overhead_s == 0


def write_trace(path: Path, num_requests: int) -> Path:
    draw = random.Random(1)
    rows = [f"{i / 5},text,{draw.randrange(20, 400)},8" for i in range(num_requests)]
    path.write_text("\n".join(["arrival_s,type,input_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory / "tiny")
    path = directory / "model.json"
    path.write_text(json.dumps({"model": "tiny", "device": "cpu", "num_threads": 1}))
    return path


def simulate(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_same_requests_go_through_engine_and_simulator(
    model_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_SEND_LAG_S", math.inf)  # other work may hold this machine
    traces = [write_trace(tmp_path / f"{name}.csv", 12) for name in ("one", "two")]
    result = simulate(
        *("--validate", "--trace", traces[0], "--trace", traces[1], "--requests", 12),
        *("--model-json", model_json, "--loads", "0.2,0.5", "--policies", "edf"),
        *("--length-divisor", 2, "--seed", 3),
    )
    cells = result["cells"]
    assert [(c["trace"], c["load"]) for c in cells] == [
        ("one", 0.2),
        ("one", 0.5),
        ("two", 0.2),
        ("two", 0.5),
    ]
    for cell in cells:
        assert (cell["policy"], cell["granularity"], cell["num_requests"]) == ("edf", "tile", 12)
        for side in ("engine", "simulator"):
            assert 0 <= cell[side]["attainment"] <= 1
            assert 0 < cell[side]["ttft_p50_s"] <= cell[side]["ttft_p99_s"] < 60
            assert 0 < cell[side]["mean_ttft_s"] <= cell[side]["ttft_p99_s"]
            assert cell[side]["num_preemptions"] >= 0
    assert result["attainment_error_points"] == max(
        abs(c["attainment_error_points"]) for c in cells
    )
    assert result["mean_ttft_error"] == max(abs(c["mean_ttft_error"]) for c in cells)
    (calibration,) = result["calibrations"]
    assert calibration["slowness"] > 0 <= calibration["overhead_s"]
    assert result["run"]["device"] == "this CPU, simulated"
    assert result["run"]["seed"] == 3


def test_a_comparison_that_was_sent_late_is_void(
    model_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_SEND_LAG_S", -1.0)
    trace = write_trace(tmp_path / "one.csv", 4)
    arguments = ("--trace", trace, "--requests", 4, "--model-json", model_json, "--loads", 0.5)
    run = CliRunner().invoke(app, ["simulate", "--validate", *map(str, arguments)])
    assert run.exit_code == VOID_EXIT_CODE
    assert "VOID: requests were sent late" in run.stdout
    assert json.loads(run.stdout.splitlines()[-1])["void"] is True


def test_a_trace_is_not_repeated_for_a_comparison(model_json: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "one.csv", 5)
    with pytest.raises(TraceError, match="of a trace of 5 requests"):
        simulate("--validate", "--trace", trace, "--requests", 6, "--model-json", model_json)


def test_a_profiled_cpu_is_a_device_like_others(model_json: Path, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "one.csv", 30)
    arguments = ("--trace", trace, "--device", "this-cpu", "--model-json", model_json)
    result = simulate(*arguments, "--requests", 30, "--policies", "fcfs,s-edf", "--load", 0.9)
    assert [run["policy"] for run in result["runs"]] == ["fcfs", "s-edf"]
    assert result["run"]["length_scale"] == 1 / 8
    assert result["run"]["max_num_seqs"] == 16
    many = simulate(*arguments, "--requests", 200, "--replicas", 5, "--load", 0.9)
    (run,) = many["runs"]
    assert sum(run["requests_by_class"].values()) == 200
    assert run["requests_by_class"].keys() == result["runs"][0]["requests_by_class"].keys()


@pytest.mark.parametrize("loads", ["", "0.5,x", "0", "inf", "-1"])
def test_loads_that_are_none_are_refused(model_json: Path, tmp_path: Path, loads: str) -> None:
    trace = write_trace(tmp_path / "one.csv", 5)
    arguments = ("--trace", trace, "--requests", 5, "--model-json", model_json, "--loads", loads)
    with pytest.raises(ConfigError, match="--loads"):
        simulate("--validate", *arguments)
