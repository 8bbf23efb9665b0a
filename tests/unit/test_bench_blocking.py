"""`flowprefill bench blocking`: where its moments fall, its figures, and a short run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from flowprefill.bench import blocking
from flowprefill.bench.blocking_run import (
    MIN_SPACING_S,
    BlockingBench,
    Cell,
    Interrupted,
    draw_moments,
    needs_undisturbed,
)
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.session import Session
from flowprefill.config import EngineConfig
from tests.factories import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, hidden=256, intermediate=1024, num_layers=6, max_len=2048)


def one(own_s: float, *blocking_s: float, undisturbed_s: float = 1.0) -> Interrupted:
    return Interrupted(own_s, undisturbed_s, list(blocking_s))


def test_moments_are_even_over_the_prefill_one_in_each_part() -> None:
    moments = draw_moments(random.Random(0), duration_s=10.0, blocking_s=[0.001])
    assert len(moments) == 10 / MIN_SPACING_S
    assert [int(m / MIN_SPACING_S + 1e-9) for m in moments] == list(range(len(moments)))


def test_moments_keep_away_from_each_other_where_prompts_wait_long() -> None:
    assert len(draw_moments(random.Random(0), 10.0, [0.25] * 20)) == 10
    assert len(draw_moments(random.Random(0), 10.0, [])) == 5  # before anything is known
    assert len(draw_moments(random.Random(0), 0.05, [0.2])) == 1  # shorter than the spacing


def test_undisturbed_prefills_are_paired_first_and_shared_later() -> None:
    cell = Cell()
    for _ in range(25):
        if needs_undisturbed(cell):
            cell.undisturbed_s.append(1.0)
        cell.interrupted.append(one(1.0, 0.1))
    assert 5 < len(cell.undisturbed_s) <= 5 + 25 // 4 + 1


def test_blocking_times_are_milliseconds_and_the_rate_is_that_of_own_work() -> None:
    cell = Cell([1.0, 1.2], [one(1.25, 0.001, 0.003), one(1.2, 0.002, undisturbed_s=1.2)])
    assert blocking.summarise(cell, 2047) == {
        "p50_ms": 2.0,
        "p99_ms": 2.98,
        "max_ms": 3.0,
        "throughput_ratio": 0.9,
        "throughput_ratio_interval": None,
        "num_preemptions": 3,
        "num_prefills": 2,
        "num_undisturbed": 2,
        "undisturbed_s": 1.1,
        "num_tokens": 2047,
    }


def test_layers_are_compared_with_tiles_at_the_longest_prompt() -> None:
    def figures(p50: float, p99: float) -> dict[str, float]:
        return {"p50_ms": p50, "p99_ms": p99}

    results = {
        "tile": {"512": figures(1, 2), "2048": figures(1, 4)},
        "layer": {"512": figures(3, 3), "2048": figures(5, 30)},
    }
    assert blocking.layer_to_tile(results) == {
        "blocking_ratio_layer_to_tile": 7.5,
        "blocking_ratio_layer_to_tile_p50": 5.0,
    }
    assert blocking.layer_to_tile({"tile": results["tile"]}) == {}


def test_a_run_has_the_preemptions_asked_for_in_each_cell(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(str(model), num_threads=1)
    results, _ = blocking.measure(config, ["tile", "layer"], [500, 2048], 6, 4, seed=0)
    for by_length in results.values():
        assert [cell["num_preemptions"] for cell in by_length.values()] == [6, 6]
        assert [cell["num_tokens"] for cell in by_length.values()] == [500, 2047]
        assert all(
            cell["p50_ms"] <= cell["p99_ms"] <= cell["max_ms"] for cell in by_length.values()
        )
        assert all(cell["throughput_ratio"] > 0 for cell in by_length.values())
    assert blocking.make_table(results).row_count == 4
    blocking.draw(results, 8.0, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(results)


def test_a_prefill_that_cannot_be_left_is_no_measurement(model: Path) -> None:
    config = EngineConfig(str(model), num_threads=1, granularity="whole", policy="s-edf")
    with Session(config, 0, lambda stage, fraction: None) as session:
        bench = BlockingBench(session, short_tokens=4, seed=0)
        with pytest.raises(BenchmarkError, match="nothing was preempted in 10 prefills of 300"):
            bench.measure(300, 5, lambda count: None)
