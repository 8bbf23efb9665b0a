"""`flowprefill simulate` on devices, models and clusters by name; the default is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench.simulate_rates import ratios
from flowprefill.cli import app
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.simulator.platform import PAPER_PLATFORM

TRACES = Path(__file__).parents[3] / "clients" / "traces"
QWEN = TRACES / "qwentrace_like_synthetic_10min.csv"


def simulate(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run(*arguments: object) -> dict[str, Any]:
    (found,) = simulate("--trace", QWEN, "--requests", 200, *arguments)["runs"]
    return found  # type: ignore[no-any-return]


WHOLE_S = [0.009887070446297204, 0.06310551665965529, 0.7156639053467337, 7.758334146040766]


@pytest.mark.parametrize(
    ("granularity", "prefills_s"),
    [
        ("whole", WHOLE_S),
        ("layer", WHOLE_S),
        ("op", WHOLE_S),
        ("chunk:512", [WHOLE_S[0], 0.06899157113129059, 0.8081249434436475, 8.342465980508285]),
        ("tile", [*WHOLE_S[:2], 0.7164079053467337, 7.772572109780335]),
    ],
)
def test_the_default_device_has_the_times_that_it_had_when_it_was_the_only_one(
    granularity: str, prefills_s: list[float]
) -> None:
    cost = PAPER_PLATFORM.cost(Granularity.parse(granularity))
    assert [cost.prefill_s(n) for n in (1, 700, 8192, 50_000)] == pytest.approx(prefills_s)
    assert cost.packed_prefill_s([(600, 0), (900, 100)]) == pytest.approx(0.11342063416682896)
    assert cost.decode_step_s(1, 1) == pytest.approx(0.00985216714075527)
    assert cost.decode_step_s(16, 20_000) == pytest.approx(0.011559513565473271)
    assert cost.saturation_tokens == 768
    assert PAPER_PLATFORM.num_blocks == 426_788 // 512


def test_prefills_on_the_default_device_go_as_they_went() -> None:
    """Prefills only: of decode steps the scheduler's rules have changed since."""
    (found,) = simulate("--trace", QWEN, "--requests", 300)["runs"]
    expected = {"attainment": 0.9833, "busy_s": 48.385, "decisions": 604, "preemptions": 129}
    expected |= {"ttft_mean_s": 0.4013, "ttft_p99_s": 4.3522, "end_s": 69.488}
    assert {name: found[name] for name in expected} == expected


def test_quicker_devices_finish_the_same_share_of_their_capacity_sooner() -> None:
    a800, h100 = run(), run("--device", "H100")
    assert h100["ttft_mean_s"] < 0.6 * a800["ttft_mean_s"]
    assert h100["attainment"] >= a800["attainment"]
    assert h100["num_requests"] == 200 and h100["wall_s"] > 0


def test_each_model_has_its_objectives_and_its_devices() -> None:
    arguments = ("--trace", QWEN, "--requests", 100, "--model", "Llama-3.1-70B")
    default = simulate(*arguments)
    assert default["run"]["device"] == "4 x A800-80GB, simulated"
    assert default["run"]["model"] == "Llama-3.1-70B"
    eight = simulate(*arguments, "--tensor-parallel", 8, "--device", "H200")
    assert eight["run"]["device"] == "8 x H200-SXM, simulated"
    assert eight["runs"][0]["ttft_mean_s"] < 0.5 * default["runs"][0]["ttft_mean_s"]
    # With the 8B model's objectives, a quarter of these, nobody could be on time.
    assert default["runs"][0]["attainment_by_class"]["text"] > 0.9


def test_many_replicas_behind_a_router() -> None:
    arguments = ("--trace", QWEN, "--requests", 5000, "--replicas", 10, "--load", 0.8)
    found = {
        router: simulate(*arguments, "--router", router)
        for router in ("round-robin", "least-load", "slack-aware")
    }
    for router, result in found.items():
        (one,) = result["runs"]
        assert (result["replicas"], result["router"]) == (10, router)
        assert one["num_requests"] == sum(one["requests_by_class"].values()) == 5000
        assert 0 < one["least_busy_share"] <= 0.8 <= one["most_busy_share"] <= 1
    mean_s = {router: result["runs"][0]["ttft_mean_s"] for router, result in found.items()}
    assert mean_s["least-load"] < 0.7 * mean_s["round-robin"]
    assert mean_s["slack-aware"] < 0.7 * mean_s["round-robin"]


def test_a_short_trace_is_repeated() -> None:
    assert run("--requests", 5000)["num_requests"] == 5000


def test_shorter_prompts_are_worked_off_sooner() -> None:
    assert run("--length-divisor", 4)["ttft_mean_s"] < 0.5 * run()["ttft_mean_s"]


def test_a_table_has_the_keys_of_the_benchmark_on_the_engine() -> None:
    arguments = ["--table", "--trace", QWEN, "--requests", 60, "--seeds", 2]
    arguments += ["--policies", "fcfs,s-edf", "--granularities", "whole,chunk:2048,tile"]
    result = simulate(*arguments)
    loads, rates = result["max_load_90"], result["max_rate_90"]
    assert rates.keys() == {f"{p}/{k}" for p in loads for k in ("whole", "chunk:2048", "tile")}
    gain = loads["s-edf"]["tile"] / loads["fcfs"]["whole"]
    ratio, low, high = result["ratio_to_fcfs"]
    assert ratio == pytest.approx(gain, rel=1e-2) and low <= ratio <= high
    assert rates["s-edf/tile"] > rates["fcfs/whole"] > 0
    for cell, rate in result["max_rate_90_every_class"].items():
        assert rate <= rates[cell]
    assert result["best"] == "s-edf/tile"
    assert result["ratio_to_own_best_chunk"] == result["ratio_to_chunk_2048"]
    assert result["num_requests"] == 60 and result["wall_s"] > 0


def test_ratios_are_of_what_was_measured() -> None:
    assert ratios({"edf/op": [1.0, 2.0]}) == {"best": "edf/op"}
    found = ratios({"edf/tile": [2.0, 4.0], "edf/chunk:512": [1.0, 2.0], "srpt/tile": [0.1, 0.1]})
    assert found == {"best": "edf/tile", "ratio_to_own_best_chunk": [2.0, 2.0, 2.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "TPU"], "--device TPU: must be one of A800"),
        (["--model", "GPT-2"], "--model GPT-2: must be one of"),
        (["--model", "Llama-3.1-70B", "--tensor-parallel", "1"], "no memory is left"),
        (["--tensor-parallel", "3"], "does not divide"),
        (["--router", "random"], "--router random: must be one of round-robin"),
        (["--table", "--replicas", "2"], "leave --replicas out"),
    ],
)
def test_what_there_is_not_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("--trace", QWEN, *arguments)
