"""`flowprefill profile` on a tiny model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flowprefill.bench import profile
from flowprefill.bench.report import BenchmarkError
from flowprefill.cli import app
from flowprefill.predictor.profile import Profile
from flowprefill.programs.slices import Group, Slice
from tests.factories import write_tiny_model
from tests.unit.predictor.shapes import TRUTH, all_shapes, make_predictor, true_s


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory / "tiny", max_len=256)
    config = {"model": "tiny", "device": "cpu", "dtype": "bfloat16", "num_threads": 1}
    (directory / "model.json").write_text(json.dumps(config))
    return directory / "model.json"


@pytest.fixture(autouse=True)
def any_machine_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the one is that the tests run on."""
    monkeypatch.setattr("flowprefill.predictor.profiler._STEADY", math.inf)


def run(model_json: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    command = ["profile", "--model-json", str(model_json), *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    return result, json.loads(result.stdout.splitlines()[-1])


def test_it_shows_the_fit_and_ends_with_the_figures(model_json: Path, tmp_path: Path) -> None:
    plot, json_out = tmp_path / "new" / "plot.png", tmp_path / "result.json"
    options = ("--prompts", "5", "--max-tokens", "200", "--refresh", "--seed", "3")
    result, figures = run(model_json, *options, "--plot", str(plot), "--json-out", str(json_out))
    assert "profile took" in result.stdout
    for kind in TRUTH.keys() - {"decode_attention"}:  # so short a context has no such slices
        assert kind in result.stdout
    assert figures["num_prompts"] == 5 and figures["is_cached"] is False
    assert figures["is_steady"] is True
    assert figures["calibration_s"] > 0 and figures["saturation_tokens"] % 64 == 0
    assert figures["prefill_mdape"] >= 0 and figures["prefill_p90_ape"] >= figures["prefill_mdape"]
    assert figures["run"]["seed"] == 3 and figures["run"]["max_tokens"] == 200
    assert json.loads(json_out.read_text()) == figures
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_later_run_takes_the_profile_from_the_cache(model_json: Path) -> None:
    run(model_json, "--prompts", "0")
    result, figures = run(model_json, "--prompts", "0")
    assert "profile from the cache" in result.stdout
    assert figures["is_cached"] is True


def test_without_prompts_nothing_is_claimed_of_them(model_json: Path) -> None:
    _, figures = run(model_json, "--prompts", "0")
    assert figures["prefill_mdape"] is None and figures["num_prompts"] == 0


def test_prompts_are_no_longer_than_the_model_takes(model_json: Path) -> None:
    _, figures = run(model_json, "--prompts", "1", "--max-tokens", "8000")
    assert figures["run"]["max_tokens"] == 255


def test_a_plot_without_matplotlib_is_refused_at_once(
    model_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchmarkError, match=r"needs matplotlib: pip install"):
        run(model_json, "--plot", "p.png")


def test_a_plot_of_an_unknown_kind_is_refused_at_once(model_json: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"p.jpeg: must end in one of .png"):
        run(model_json, "--plot", "p.jpeg")


def test_lengths_are_spread_over_all_orders_of_magnitude() -> None:
    lengths = profile.draw_lengths(3000, 8000, seed=0)
    assert min(lengths) >= 16 and max(lengths) <= 8000
    for low, high in ((16, 76), (76, 357), (357, 1690), (1690, 8000)):
        assert 0.2 < sum(low <= n < high for n in lengths) / 3000 < 0.3
    assert profile.draw_lengths(10, 8000, seed=0) == lengths[:10]
    assert set(profile.draw_lengths(10, 16, seed=0)) == {16}


def made_profile(slow_mlp: float = 1.0) -> Profile:
    """Shapes that took what the coefficients say, but for those of the MLP."""
    samples: list[tuple[Slice, float]] = []
    for piece in all_shapes():
        slowness = slow_mlp if piece.group is Group.MLP else 1.0
        samples.append((piece, true_s(piece) * slowness))
    return Profile(samples, [(1, 1e-3)], True, 4.25)


def test_errors_are_shares_of_the_measured_time() -> None:
    measured = [
        profile.Measured(100, predicted_s=1.1, profiled_s=2.2, measured_s=1.0),
        profile.Measured(200, predicted_s=1.8, profiled_s=3.6, measured_s=2.0),
        profile.Measured(300, predicted_s=4.5, profiled_s=9.0, measured_s=3.0),
    ]
    figures = profile.summarise(made_profile(), make_predictor(), measured)
    assert figures["prefill_mdape"] == 0.1
    assert figures["prefill_p90_ape"] == 0.42
    assert figures["prefill_mdape_without_speed_factor"] == 1.2
    assert figures["calibration_s"] == 4.25
    assert (figures["num_prompts"], figures["num_tokens"]) == (3, 600)
    assert figures["saturation_tokens"] == make_predictor().saturation_tokens


def test_the_table_has_formula_and_error_of_every_kind() -> None:
    table = profile.fit_table(made_profile(slow_mlp=1.25), make_predictor())
    kinds, formulas, shapes, medians, p90s = (list(column.cells) for column in table.columns)
    assert kinds == list(TRUTH)
    assert formulas[kinds.index("head")] == "3e+03 + 0.2 per key"
    assert formulas[kinds.index("qkv")] == "50 + 3 per row + 1 per row > 64"
    assert sum(map(int, shapes)) == len(list(all_shapes()))
    for kind, median, p90 in zip(kinds, medians, p90s, strict=True):
        assert median == p90 == ("20.0%" if kind == "mlp" else "0.0%")
