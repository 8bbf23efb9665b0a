"""`flowprefill bench decode-mix` and `prefix`: their figures, and short runs on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench import decode_mix, prefix
from flowprefill.bench.report import BenchmarkError
from flowprefill.cli import app
from flowprefill.errors import PromptTooLongError
from tests.factories import write_tiny_model


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("model"), max_len=2048)
    path = directory / "model.json"
    path.write_text('{"model": ".", "num_threads": 1}')
    return path


def bench(*arguments: str) -> dict[str, Any]:
    """Run `flowprefill bench ...`; returns the JSON object of its last line."""
    run = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert run.exit_code == 0
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_only_gaps_during_a_prefill_count() -> None:
    measured = decode_mix.Measured()
    # Gaps:          1.0  1.5  0.5  1.0  2.0
    stream = [0.0, 1.0, 2.5, 3.0, 4.0, 6.0]
    measured.add(stream, [(1.25, 2.75), (5.0, 9.0)])
    assert measured.gaps_s == [1.5, 0.5, 2.0]
    assert measured.mixed_ttft_s == [1.5, 4.0]
    assert measured.covered_s == 1.5 + 1.0


def test_a_gap_over_two_prefills_counts_once() -> None:
    measured = decode_mix.Measured()
    measured.add([0.0, 1.0, 2.0], [(1.1, 1.4), (1.5, 1.9)])
    assert measured.gaps_s == [1.0]


def test_a_stream_that_is_over_covers_no_later_prefill() -> None:
    measured = decode_mix.Measured()
    measured.add([0.0, 1.0], [(2.0, 3.0)])
    assert (measured.covered_s, measured.gaps_s) == (0.0, [])
    with pytest.raises(BenchmarkError, match="more tokens"):
        decode_mix.summarise(measured, 100.0)


def test_decode_mix_figures_are_milliseconds_and_the_share_that_prefills_lose() -> None:
    measured = decode_mix.Measured(
        alone_ttft_s=[8.0, 8.0, 9.0],
        mixed_ttft_s=[10.0, 9.0, 11.0],
        gaps_s=[0.1, 0.1, 0.11],
        covered_s=27.0,
    )
    result = decode_mix.summarise(measured, 100.0)
    assert result == {
        "itl_p99_ms": 109.8,
        "tbt_slo_ms": 100.0,
        "prefill_slowdown": 0.25,
        "itl_p50_ms": 100.0,
        "itl_max_ms": 110.0,
        "num_gaps": 3,
        "prefill_alone_ttft_s": 8.0,
        "prefill_mixed_ttft_s": 10.0,
        "num_prefills": 3,
        "stream_coverage": 0.9,
    }
    lengths = decode_mix.Lengths(7500, 32, 200)
    assert decode_mix.make_table(result, lengths).row_count == 7


def test_decode_mix_measures_a_stream_beside_prefills(tmp_path: Path, model_json: Path) -> None:
    json_out = tmp_path / "mix.json"
    result = bench("decode-mix", "--rounds", "1", "--long-tokens", "1000", "--stream-tokens", "150",
                   "--tbt-slo-ms", "10", "--model-json", str(model_json),
                   "--json-out", str(json_out))  # fmt: skip
    assert json.loads(json_out.read_text()) == result
    assert result["num_prefills"] == decode_mix.NUM_PREFILLS
    assert result["num_gaps"] > 0
    assert 0 < result["itl_p50_ms"] <= result["itl_p99_ms"] <= result["itl_max_ms"]
    assert 0 < result["stream_coverage"] <= 1
    assert result["tbt_slo_ms"] == 10
    assert result["run"]["long_tokens"] == 1000


def test_what_the_model_cannot_take_ends_the_benchmark(model_json: Path) -> None:
    with pytest.raises(PromptTooLongError, match="max_model_len=2048"):
        bench("decode-mix", "--long-tokens", "5000", "--model-json", str(model_json))


def pair(num_cached: int = 96, warm: tuple[int, ...] = (1, 2)) -> prefix.Measured:
    return prefix.Measured(
        cold_ttft_s=[2.0, 4.0, 3.0],
        warm_ttft_s=[0.3, 0.3, 0.6],
        num_cached_tokens=[112, num_cached, 112],
        warm_token_ids=[[1, 2], list(warm), [3, 4]],
        cold_token_ids=[[1, 2], [1, 2], [3, 4]],
    )


def test_prefix_figures_are_medians_and_the_worst_pair() -> None:
    result = prefix.summarise(pair())
    assert result == {
        "warm_over_cold_ttft": 0.1,
        "same_text": True,
        "worst_ratio": 0.2,
        "cold_ttft_s": 3.0,
        "warm_ttft_s": 0.3,
        "num_cached_tokens": 96,
        "num_pairs": 3,
    }
    assert prefix.make_table(result, prefix.Lengths(100, 5, 2)).row_count == 6


def test_one_other_token_is_another_text() -> None:
    assert prefix.summarise(pair(warm=(1, 3)))["same_text"] is False


def test_a_second_prompt_that_found_nothing_is_no_measurement() -> None:
    with pytest.raises(BenchmarkError, match="found nothing in the cache"):
        prefix.summarise(pair(num_cached=0))


def test_prefix_finds_the_full_blocks_and_gives_the_same_answers(model_json: Path) -> None:
    result = bench("prefix", "--rounds", "2", "--prefix-tokens", "1000", "--own-tokens", "20",
                   "--answer-tokens", "8", "--model-json", str(model_json))  # fmt: skip
    assert result["num_cached_tokens"] == 1000 // 16 * 16
    assert result["same_text"] is True
    assert result["num_pairs"] == 2
    assert result["warm_over_cold_ttft"] > 0
