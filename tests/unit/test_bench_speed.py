"""`flowprefill bench prefill`, `decode`, `path`: their figures, and short runs on a tiny model."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flowprefill.bench import decode, options, path, prefill
from flowprefill.bench.flops import prefill_flops
from flowprefill.bench.gemm_ceiling import gemm_flops
from flowprefill.bench.intervals import median_and_interval, median_interval
from flowprefill.bench.prefill_modes import MODES
from flowprefill.bench.prefill_rounds import MIN_ROUNDS, Rounds, order, run_rounds
from flowprefill.bench.report import BenchmarkError
from flowprefill.cli import app
from flowprefill.errors import ConfigError
from flowprefill.programs.model_spec import ModelSpec, read_model_spec
from tests.factories import write_tiny_model


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("model"), max_len=1024)
    path = directory / "model.json"
    path.write_text('{"model": ".", "num_threads": 1}')
    return path


@pytest.fixture(scope="module")
def spec(model_json: Path) -> ModelSpec:
    return read_model_spec(model_json.parent)


def bench(*arguments: str) -> dict[str, Any]:
    """Run `flowprefill bench ...`; returns the JSON object of its last line."""
    run = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert run.exit_code == 0
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


# ---- parts --------------------------------------------------------------------------------------


def test_the_interval_holds_the_median_95_times_of_100() -> None:
    draw = random.Random(1)
    num_held = 0
    for _ in range(2000):
        values = [draw.expovariate(1.0) for _ in range(20)]  # median: log 2
        low, high = median_interval(values) or (0.0, 0.0)
        num_held += low <= 0.6931 <= high
    assert 0.94 < num_held / 2000 < 0.99


def test_few_values_have_no_interval() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_and_interval([1.0, 3.0]) == [2.0]


def test_flops_are_those_of_the_products_of_a_causal_prefill(spec: ModelSpec) -> None:
    """Counted row by row, as the program runs them."""
    hidden, inter, q, kv = 64, 96, 64, 32
    attention = sum(4 * q * (row + 1) for row in range(100))
    layer = 100 * 2 * (hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inter) + attention
    last = 100 * 2 * hidden * (q + 2 * kv) + 2 * (q * hidden + 3 * hidden * inter) + 4 * q * 100
    assert prefill_flops(spec, 100) == 2 * layer + last + 2 * hidden * spec.vocab_size


def test_the_product_s_rate_is_a_rate(spec: ModelSpec) -> None:
    assert 1e6 < gemm_flops(spec, torch.float32, torch.device("cpu")) < 1e15


def test_a_prompt_as_long_as_the_model_takes_leaves_room_for_its_token() -> None:
    assert options.prompt_tokens(512, 1024) == 512
    assert options.prompt_tokens(1024, 1024) == 1023
    with pytest.raises(BenchmarkError, match="max_model_len is 1024"):
        options.prompt_tokens(1025, 1024)


def test_a_dtype_that_no_engine_has_is_refused(model_json: Path) -> None:
    assert options.load_config(model_json, "float32").dtype == "float32"
    assert options.load_config(model_json, None).dtype == "auto"
    with pytest.raises(ConfigError, match="float16"):
        options.load_config(model_json, "float16")


# ---- prefill ------------------------------------------------------------------------------------


def test_every_way_comes_first_equally_often() -> None:
    firsts = [order(["a", "b", "c"], index)[0] for index in range(6)]
    assert sorted(firsts) == ["a", "a", "b", "b", "c", "c"]


def fixed(seconds: float, seeds: list[int]) -> Callable[[int], float]:
    def prefill(seed: int) -> float:
        seeds.append(seed)
        return seconds

    return prefill


def test_ways_see_the_same_prompts_and_the_first_round_does_not_count() -> None:
    a: list[int] = []
    b: list[int] = []
    ticks = itertools.count()
    ways = {"a": fixed(1.0, a), "b": fixed(2.0, b)}
    rounds = run_rounds(ways, 4, 1e9, seed=7, on_round=lambda: next(ticks))
    assert a == b == [7, 8, 9, 10, 11]
    assert rounds.seconds == {"a": [1.0] * 4, "b": [2.0] * 4}
    assert next(ticks) == 4


def test_a_budget_that_is_spent_ends_the_rounds_but_not_before_the_third() -> None:
    rounds = run_rounds({"a": fixed(1.0, [])}, 20, 0.0, seed=0, on_round=lambda: None)
    assert rounds.num_rounds == MIN_ROUNDS


def measured(spec: ModelSpec) -> prefill.Measured:
    rounds = Rounds(
        {
            "sliced": [1.0, 2.0, 1.0],
            "unchecked": [0.9, 1.9, 0.99],
            "whole": [0.95, 1.9, 1.2],
            "peer": [2.0, 2.0, 2.0],
        }
    )
    rate = 2.0 * prefill_flops(spec, 100)
    return prefill.Measured(spec, {}, {100: 100}, {100: rounds}, rate)


def test_prefill_figures_are_ratios_within_rounds(spec: ModelSpec) -> None:
    result = prefill.summarise(measured(spec), ["peer"])
    assert result["tokens_per_s"] == {"100": 100.0}
    assert result["sliced_ratio_base"] == {"100": "unchecked"}
    assert result["sliced_ratio"] == {"100": 0.95}  # of 0.9, 0.95, 0.99
    assert result["sliced_ratio_interval"] == {"100": None}
    assert result["ceiling_fraction"] == {"100": 0.5}
    assert result["peers"] == {"peer": {"100": 50.0}}
    assert result["peer_ratio"] == {"peer": {"100": [2.0]}}
    assert prefill.make_table(result).row_count == 1


def test_prefill_measures_all_ways(model_json: Path, tmp_path: Path) -> None:
    json_out = tmp_path / "prefill.json"
    result = bench("prefill", "--lengths", "64", "--lengths", "1024", "--rounds", "2", "--dtype",
                   "float32", "--model-json", str(model_json),
                   "--json-out", str(json_out))  # fmt: skip
    assert json.loads(json_out.read_text()) == result
    keys = ("tokens_per_s", "sliced_ratio", "ceiling_fraction", "unchecked_tokens_per_s",
            "whole_tokens_per_s")  # fmt: skip
    for key in keys:
        assert set(result[key]) == {"64", "1024"}
        assert min(result[key].values()) > 0
    assert result["num_tokens"] == {"64": 64, "1024": 1023}
    assert result["num_rounds"] == {"64": 2, "1024": 2}
    assert result["peers"] == {}
    assert result["run"]["dtype"] == "float32" and result["run"]["num_threads"] == 1


def test_the_modes_are_those_that_the_figures_name() -> None:
    assert set(MODES) == {prefill.SLICED, prefill.UNCHECKED, prefill.WHOLE}


# ---- decode -------------------------------------------------------------------------------------


def test_only_steps_of_all_streams_count() -> None:
    early = [0.0, 1.0, 2.0, 3.0, 5.0]
    late = [1.5, 2.0, 3.0, 5.0, 6.0]
    assert decode.steady_steps([early, late]) == [1.0, 2.0]
    with pytest.raises(BenchmarkError, match="more tokens"):
        decode.steady_steps([[0.0, 1.0], [1.0, 2.0]])


def test_decode_rates_are_of_all_streams_together() -> None:
    result = decode.summarise(
        decode.Measured({1: [0.1, 0.1], 4: [0.2, 0.2]}, {"peer": [0.05, 0.05, 0.1]})
    )
    assert result["tokens_per_s"] == {"1": 10.0, "4": 20.0}
    assert result["step_ms"] == {"1": 100.0, "4": 200.0}
    assert result["peers"] == {"peer": {"1": 20.0}}
    assert decode.make_table(result, decode.Lengths(128, 64)).row_count == 3


def test_decode_measures_streams_that_decode_together(model_json: Path) -> None:
    result = bench("decode", "--batch", "1", "--batch", "3", "--tokens", "16", "--context", "20",
                   "--rounds", "2", "--model-json", str(model_json))  # fmt: skip
    assert set(result["tokens_per_s"]) == {"1", "3"}
    assert result["num_steps"]["1"] == 2 * (16 - 2)
    assert 0 < result["num_steps"]["3"] <= 2 * (16 - 2)
    assert result["step_p99_ms"]["3"] >= result["step_ms"]["3"] > 0
    assert result["run"]["context"] == 20


# ---- path ---------------------------------------------------------------------------------------


def test_overheads_are_differences_of_one_prompt_s_two_times() -> None:
    times = path.Measured([0.05, 0.04, 0.07], [0.03, 0.03, 0.03], {"queue": 0.0001})
    result = path.summarise(times)
    assert result["overhead_p50_ms"] == 20.0
    assert result["overhead_p99_ms"] == pytest.approx(39.6)
    assert result["client_ttft_p50_ms"] == 50.0
    assert result["in_process_ttft_mean_ms"] == 30.0
    assert result["server_mean_ms"] == {"queue": 0.1}
    assert path.make_table(result, 16).row_count == 4


def test_the_server_s_means_are_of_what_came_between() -> None:
    before = {"queue": (10, 1.0), "execute": (3, 0.5)}
    assert path.mean_between(before, {"queue": (14, 1.2), "execute": (3, 0.5)}) == {
        "queue": pytest.approx(0.05)
    }
