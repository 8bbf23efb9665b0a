"""`bench goodput`: where it measures, what it concludes, and a small run on a real engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flowprefill.bench import pace
from flowprefill.bench.compared import best_cell, compared_cells
from flowprefill.bench.crossing import (
    MAX_LOAD,
    MIN_LOAD,
    STEP,
    bootstrap,
    crossing,
    next_load,
    snap,
)
from flowprefill.bench.goodput import SCALE_LOAD
from flowprefill.bench.goodput_outcomes import (
    CellResult,
    Outcome,
    OutcomeStore,
    Point,
    attainment,
    worst_class_attainment,
)
from flowprefill.bench.goodput_plan import (
    MIN_REQUESTS,
    GoodputPlan,
    make_plan,
    num_searches,
    requests_within,
)
from flowprefill.bench.goodput_plots import figures, shown_cells
from flowprefill.bench.goodput_report import make_tables, summarise
from flowprefill.bench.goodput_runs import Cell, GoodputRuns, check_same_knobs, with_cell
from flowprefill.bench.objectives import ClassScale, class_scales, scaled_objectives
from flowprefill.bench.options import load_config
from flowprefill.bench.pace import Pace
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import VOID_EXIT_CODE, BenchmarkError, code_digest
from flowprefill.bench.simulate_plan import Plan, make_window, measured_plan
from flowprefill.bench.simulate_plan import Window as SimWindow
from flowprefill.cli import app
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.predictor import profiler
from flowprefill.replay import records as replay_records
from flowprefill.simulator.platform import PAPER_PLATFORM
from flowprefill.workload import TraceRequest, objective, read_trace
from tests.factories import write_tiny_model
from tests.unit.plots.test_chrome_trace import check_device_does_one_thing, check_valid
from tests.unit.plots.test_figures import check_nothing_overlaps

TARGET = 0.9


class TestCrossing:
    @given(st.floats(0.03, 15.0), st.floats(0.03, 15.0))
    def test_the_walk_ends_with_neighbours_around_the_crossing(
        self, true_load: float, guess: float
    ) -> None:
        curve: dict[float, float] = {}
        while (load := next_load(curve, snap(guess), TARGET)) is not None:
            assert load not in curve
            curve[load] = 1.0 if load <= true_load else 0.5
        met = max(load for load, value in curve.items() if value >= TARGET)
        missed = min(load for load, value in curve.items() if value < TARGET)
        assert met <= true_load < missed
        assert missed / met == pytest.approx(STEP, rel=1e-4)

    @pytest.mark.parametrize(("true_load", "most"), [(1.05, 2), (1.25, 4), (0.8, 4), (0.03, 13)])
    def test_a_guess_far_off_costs_few_measurements(self, true_load: float, most: int) -> None:
        curve: dict[float, float] = {}
        while (load := next_load(curve, snap(1.0), TARGET)) is not None:
            curve[load] = 1.0 if load <= true_load else 0.5
        assert len(curve) <= most  # 0.03 is 37 steps off

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_the_walk_ends_where_the_target_is_always_or_never_met(self, value: float) -> None:
        curve: dict[float, float] = {}
        while (load := next_load(curve, snap(1.0), TARGET)) is not None:
            curve[load] = value
        assert len(curve) < 100
        end = max(curve) if value else min(curve)
        assert end == pytest.approx(MAX_LOAD if value else MIN_LOAD, rel=0.1)

    def test_what_is_known_is_not_measured_again(self) -> None:
        known = {snap(STEP**k): 1.0 if k < 3 else 0.5 for k in range(6)}
        assert next_load(known, snap(1.0), TARGET) is None
        assert next_load(known, snap(STEP**5), TARGET) is None

    def test_between_two_loads_it_is_linear_in_the_logarithm(self) -> None:
        assert crossing({1.0: 0.95, 2.0: 0.85}, TARGET) == pytest.approx(2**0.5)
        assert crossing({1.0: 0.9, 2.0: 0.5}, TARGET) == 1.0
        assert crossing({1.0: 1.0, 2.0: 0.9}, TARGET) == 2.0

    def test_luck_beyond_the_first_miss_does_not_count(self) -> None:
        assert crossing({1.0: 0.95, 2.0: 0.85, 4.0: 0.99}, TARGET) < 2.0

    def test_beyond_the_measured_loads_it_is_a_step_below_or_the_highest(self) -> None:
        assert crossing({1.0: 0.8, 2.0: 0.7}, TARGET) == pytest.approx(1 / STEP)
        assert crossing({1.0: 1.0, 2.0: 0.95}, TARGET) == 2.0

    def test_bootstrap_covers_the_mean_and_shrinks_with_more_windows(self) -> None:
        rng = random.Random(1)
        widths = []
        for num_windows in (10, 160):
            values = [rng.gauss(5.0, 1.0) for _ in range(num_windows)]

            def mean_of(indices: Sequence[int], values: list[float] = values) -> float:
                return sum(values[i] for i in indices) / len(indices)

            low, high = bootstrap(mean_of, num_windows, seed=0)
            assert low < mean_of(range(num_windows)) < high
            widths.append(high - low)
        assert widths[1] < widths[0] / 2
        assert bootstrap(lambda indices: 3.0, 10, seed=0) == (3.0, 3.0)


class TestCompared:
    LOADS: ClassVar = {
        "fcfs/whole": 0.3,
        "s-edf/tile": 1.0,
        "goodput/tile": 1.1,
        "goodput/chunk:32": 1.2,
        "goodput/chunk:256": 0.8,
        "srpt/chunk:32": 2.0,
    }

    def test_what_is_preempted_anywhere_is_set_against_its_own_chunks(self) -> None:
        """Also where a chunk is better: that must show."""
        assert best_cell(self.LOADS) == "goodput/tile"
        assert compared_cells(self.LOADS, "chunk:256") == {
            "ratio_to_fcfs": ("s-edf/tile", "fcfs/whole"),
            "ratio_to_chunk_2048": ("goodput/tile", "goodput/chunk:256"),
            "ratio_to_own_best_chunk": ("goodput/tile", "goodput/chunk:32"),
        }

    def test_what_was_not_measured_has_no_ratio(self) -> None:
        loads = {"fcfs/whole": 0.3, "srpt/chunk:32": 2.0}
        assert best_cell(loads) == "srpt/chunk:32"
        assert compared_cells(loads, "chunk:256") == {}
        assert compared_cells({"srpt/chunk:256": 2.0}, "chunk:256") == {}


class TestObjectives:
    TRACE = (
        TraceRequest(0.0, "text", 700, 10),
        TraceRequest(1.0, "text", 900, 10),
        TraceRequest(2.0, "file", 8000, 10),
    )

    def test_each_keeps_the_papers_ratio_to_the_solo_time(self) -> None:
        scales = class_scales(self.TRACE, 0.125, our_solo_s=lambda tokens: tokens / 1000)
        assert {name: scale.median_tokens for name, scale in scales.items()} == {
            "file": 8000,
            "text": 700,
        }
        assert scales["file"].our_solo_s == 1.0
        text, _, file = scaled_objectives(self.TRACE, scales)
        assert text.ttft_s / scales["text"].our_solo_s == pytest.approx(
            0.25 / scales["text"].a800_solo_s
        )
        assert file.ttft_s == pytest.approx(6.0 / scales["file"].a800_solo_s)
        assert (text.name, text.tbt_s) == ("text", 0.1)

    def test_a_scale_is_for_all(self) -> None:
        scales = {"text": ClassScale(700, 0.1, 0.2), "file": ClassScale(8000, 1.0, 1.0)}
        goals = scaled_objectives(self.TRACE, scales, slo_scale=0.5)
        assert [goal.ttft_s for goal in goals] == pytest.approx([0.25, 0.25, 3.0])

    def test_a_plans_scale_reaches_its_requests(self) -> None:
        plan = Plan((), (), (), 1, 3, 0.0, 1, SCALE_LOAD, model=None)
        whole, half = (
            make_window(
                dataclasses.replace(plan, slo_scale=scale), [*self.TRACE], [*self.TRACE]
            ).objectives
            for scale in (1.0, 0.5)
        )
        assert [goal.ttft_s for goal in half] == pytest.approx([g.ttft_s / 2 for g in whole])


def outcome(**on_time: tuple[int, int]) -> Outcome:
    """class=(on time, requests)"""
    return Outcome(
        num_by_class={name: total for name, (_, total) in on_time.items()},
        on_time_by_class={name: count for name, (count, _) in on_time.items()},
    )


class TestOutcomes:
    def test_attainment_is_of_all_windows_together(self) -> None:
        windows = [outcome(text=(9, 10), file=(1, 2)), outcome(text=(30, 30))]
        assert attainment(windows) == 40 / 42
        assert worst_class_attainment(windows) == 0.5

    def test_the_store_gives_back_what_was_measured(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "records.jsonl"
        point = Point("s-edf/tile", 1.1, 0.5)
        measured = Outcome({"text": 2}, {"text": 1}, {"text": [0.1, float("inf")]}, [0.01], [0.001])
        OutcomeStore(path, "key").add(point, [measured])
        assert OutcomeStore(path, "key").outcomes == {point: [measured]}
        with pytest.raises(BenchmarkError, match="another configuration"):
            OutcomeStore(path, "other")
        assert OutcomeStore(None, "key").outcomes == {}

    def test_what_was_sent_late_is_measured_again(self, tmp_path: Path) -> None:
        path, good, late = tmp_path / "records.jsonl", Point("a", 1.0), Point("b", 1.0)
        store = OutcomeStore(path, "key")
        store.add(good, [Outcome(send_lags_s=[0.001])])
        store.add(late, [Outcome(send_lags_s=[0.2])])
        again = OutcomeStore(path, "key")
        assert set(again.outcomes) == {good}
        again.add(late, [Outcome(send_lags_s=[0.002])])
        assert set(OutcomeStore(path, "key").outcomes) == {good, late}

    def test_what_other_code_measured_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "records.jsonl"
        OutcomeStore(path, "key")
        header = json.loads(path.read_text())
        path.write_text(json.dumps({**header, "code": "another"}) + "\n")
        with pytest.raises(BenchmarkError, match="or code"):
            OutcomeStore(path, "key")

    def test_code_is_known_by_its_source(self, tmp_path: Path) -> None:
        source = tmp_path / "package" / "kernel.cpp"
        source.parent.mkdir()
        digests = [code_digest([tmp_path])]
        for text in ("int a;", "int b;"):
            source.write_text(text)
            digests.append(code_digest([tmp_path]))
        assert len(set(digests)) == 3
        (tmp_path / "notes.txt").write_text("of no weight")
        assert code_digest([tmp_path]) == digests[-1]
        assert code_digest() == code_digest() != code_digest([])


class TestSendLags:
    S_EDF, FCFS = Cell("s-edf", "tile"), Cell("fcfs", "whole")

    @staticmethod
    def sent(lag_s: float) -> list[Outcome]:
        """A replay of two blocks."""
        ttft = {"text": [0.1] * 10}
        return [Outcome({"text": 10}, {"text": 10}, ttft, send_lags_s=[lag_s] * 10)] * 2

    def summary(self, **results: CellResult) -> dict[str, Any]:
        requests = [TraceRequest(float(i), "text", 1000, 1) for i in range(20)]
        window = SimWindow(requests, [objective(request) for request in requests])
        cells = {"s_edf": self.S_EDF, "fcfs": self.FCFS}
        guesses = {cells[name]: (1.0, 1.0) for name in results}
        self.plan = GoodputPlan(PAPER_PLATFORM, window, 2, guesses, frozenset(), {}, 1.0)
        return summarise(self.plan, {cells[name]: r for name, r in results.items()}, seed=0)

    def test_one_late_replay_among_many_makes_it_void(self) -> None:
        by_load = {i / 100: self.sent(0.001) for i in range(1, 121)}
        assert self.summary(s_edf=CellResult(dict(by_load)))["void"] is False
        found = self.summary(s_edf=CellResult({**by_load, 1.3: self.sent(0.02)}))
        assert (found["void"], found["send_lag_p99_ms"]) == (True, 20.0)
        points = found["cells"]["s-edf/tile"]
        assert [p["load"] for p in points if p["void"]] == [1.3]
        assert {p["send_lag_p99_ms"] for p in points} == {1.0, 20.0}
        lags = list(make_tables(self.plan, found)[1].columns[-1].cells)
        assert lags == ["1.0 ms"] * 120 + ["20.0 ms, void"]

    def test_a_late_cell_beside_clean_ones_makes_it_void(self) -> None:
        clean = CellResult({i / 100: self.sent(0.001) for i in range(1, 121)})
        found = self.summary(s_edf=clean, fcfs=CellResult({0.5: self.sent(0.006)}))
        assert found["void"] is True
        lags = list(make_tables(self.plan, found)[1].columns[-1].cells)
        assert lags[-2:] == ["1.0 ms", "6.0 ms, void"]

    def test_replays_for_the_tightest_objectives_count_too(self) -> None:
        late = CellResult({1.0: self.sent(0.001)}, {1.0: self.sent(0.001), 2.0: self.sent(0.006)})
        assert self.summary(s_edf=late)["void"] is True


class TestKnobs:
    CONFIG = EngineConfig(model="m")

    def test_cells_differ_in_policy_and_granularity_alone(self) -> None:
        cells = [Cell.parse(name) for name in ("fcfs/whole", "s-edf/tile", "goodput/chunk:64")]
        configs = [with_cell(self.CONFIG, cell) for cell in cells]
        assert [(c.policy, c.granularity) for c in configs] == [
            ("fcfs", "whole"),
            ("s-edf", "tile"),
            ("goodput", "chunk:64"),
        ]
        check_same_knobs(configs)

    @pytest.mark.parametrize(
        "knob", [{"max_slice_ms": 2.0}, {"starvation_share": 0.2}, {"max_num_seqs": 4}]
    )
    def test_any_other_difference_is_refused_by_name(self, knob: dict[str, float]) -> None:
        other = dataclasses.replace(self.CONFIG, **knob)
        with pytest.raises(BenchmarkError, match=next(iter(knob))):
            check_same_knobs([self.CONFIG, other])


def test_blocks_are_consecutive_and_hold_everything() -> None:
    plan = GoodputPlan(PAPER_PLATFORM, SimWindow([], []), 3, {}, frozenset(), frozenset(), 1.0)
    assert plan.blocks([1, 2, 3, 4, 5]) == [[1, 2], [3], [4, 5]]
    assert plan.blocks([1, 2, 3]) == [[1], [2], [3]]


@pytest.mark.parametrize("command", ["goodput", "servers"])
def test_blocks_of_no_requests_are_refused_before_anything_is_done(command: str) -> None:
    nothing = ("--trace", "none.csv", "--model-json", "none.json")
    run = CliRunner().invoke(app, ["bench", command, *nothing, "--requests", "2", "--blocks", "10"])
    assert isinstance(run.exception, ConfigError)
    assert str(run.exception) == "--blocks 10: there are 2 requests to divide"


def test_blocks_of_no_requests_are_refused_however_many_there_is_time_for() -> None:
    options = measured_plan(PAPER_PLATFORM, Path("none.csv"), 60, 1, 1.0)
    with pytest.raises(ConfigError, match="--blocks 61"):
        make_plan(options, 61, (), print)


def test_answers_that_leave_no_room_for_a_prompt_are_refused() -> None:
    num_tokens = PAPER_PLATFORM.max_tokens
    requests = [TraceRequest(0.0, "text", 100, 1)]
    fits = measured_plan(PAPER_PLATFORM, Path("t.csv"), 1, num_tokens - 1, 1.0)
    assert make_window(fits, requests, requests).requests[0].input_tokens == 1
    with pytest.raises(ConfigError, match=f"--output-tokens {num_tokens}"):
        make_window(dataclasses.replace(fits, max_output_tokens=num_tokens), requests, requests)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Path]:
    """A model that prefills in milliseconds, and a trace."""
    model = write_tiny_model(tmp_path, max_len=2048)
    model_json = model / "model.json"
    model_json.write_text('{"model": ".", "num_threads": 1}')
    rng = random.Random(0)
    rows = [
        f"{time_s / 10:.1f},{'search' if time_s % 7 == 0 else 'text'},{rng.randint(200, 4000)},20"
        for time_s in range(60)
    ]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival_s,type,input_tokens,output_tokens", *rows]) + "\n")
    return model_json, trace


def test_pictures_show_what_was_measured_each_cell_at_its_own_loads() -> None:
    requests = [TraceRequest(float(i), "text", 1000 + i, 1) for i in range(12)]
    window = SimWindow(requests, [objective(request) for request in requests])
    fcfs, s_edf = Cell("fcfs", "whole"), Cell("s-edf", "tile")
    guesses = {fcfs: (1.0, 1.0), s_edf: (1.0, 1.0)}
    plan = GoodputPlan(PAPER_PLATFORM, window, 2, guesses, frozenset(), {}, 1.0)

    def blocks(*counts: int) -> list[Outcome]:
        return [
            Outcome({"text": 6}, {"text": n}, {"text": [0.1] * n + [9.0] * (6 - n)}) for n in counts
        ]

    results = {
        fcfs: CellResult({SCALE_LOAD: blocks(3, 5), 0.35: blocks(6, 6)}),
        s_edf: CellResult(
            {1.1: blocks(5, 5), SCALE_LOAD: blocks(6, 6)}, {2.0: blocks(3, 3), 1.0: blocks(6, 6)}
        ),
    }
    found = figures(plan, results, "a trace")
    assert list(found) == ["rate", "slo_scale", "ttft"]
    (panel,) = found["rate"].axes
    assert panel.get_title() == "s-edf"
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert list(lines) == ["fcfs/whole", "tile", "offline bound", "target 90%"]
    assert list(lines["fcfs/whole"].get_xdata()) == [0.35, SCALE_LOAD]
    assert list(lines["fcfs/whole"].get_ydata()) == pytest.approx([1.0, 8 / 12])
    assert list(lines["tile"].get_xdata()) == [SCALE_LOAD, 1.1]
    assert list(lines["offline bound"].get_xdata()) == [0.35, SCALE_LOAD, 1.1]
    expected = [(plan.offline_bound(load) or 0) / 12 for load in (0.35, SCALE_LOAD, 1.1)]
    assert list(lines["offline bound"].get_ydata()) == pytest.approx(expected)
    lines = {line.get_label(): line for line in found["slo_scale"].axes[0].get_lines()}
    assert list(lines["s-edf/tile"].get_xdata()) == [0.5, 1.0]
    assert list(lines["s-edf/tile"].get_ydata()) == pytest.approx([0.5, 1.0])
    assert "load 0.7" in found["ttft"].get_suptitle()
    lines = {line.get_label(): line for line in found["ttft"].axes[0].get_lines()}
    assert max(lines["fcfs/whole"].get_xdata()) == 9.0
    assert max(lines["s-edf/tile"].get_xdata()) == 0.1
    for figure in found.values():
        check_nothing_overlaps(figure)


def test_each_policy_has_a_panel_with_the_baseline_in_it() -> None:
    requests = [TraceRequest(float(i), "text", 1000, 1) for i in range(4)]
    window = SimWindow(requests, [objective(request) for request in requests])
    outcomes = [Outcome({"text": 4}, {"text": 4}, {"text": [0.1] * 4})]

    def panels(*names: str) -> dict[str, list[str]]:
        guesses = {Cell.parse(name): (1.0, 1.0) for name in names}
        plan = GoodputPlan(PAPER_PLATFORM, window, 1, guesses, frozenset(), {}, 1.0)
        results = {cell: CellResult({SCALE_LOAD: outcomes}) for cell in guesses}
        axes = figures(plan, results, "")["rate"].axes
        return {a.get_title(): [str(line.get_label()) for line in a.get_lines()[:-2]] for a in axes}

    assert panels("fcfs/whole", "s-edf/tile", "srpt/tile", "s-edf/chunk:64") == {
        "s-edf": ["fcfs/whole", "tile", "chunk:64"],
        "srpt": ["fcfs/whole", "tile"],
    }
    assert panels("goodput/tile", "fcfs/tile") == {"goodput": ["tile"], "fcfs": ["tile"]}
    assert panels("fcfs/whole") == {"fcfs": ["whole"]}


def test_ttfts_are_compared_at_the_usual_cells_or_at_all() -> None:
    def shown(*names: str) -> list[str]:
        guesses = {Cell.parse(name): (1.0, 1.0) for name in names}
        window = SimWindow([], [])
        plan = GoodputPlan(PAPER_PLATFORM, window, 1, guesses, frozenset(), {}, 1 / 8)
        return [cell.name for cell in shown_cells(plan)]

    assert shown("fcfs/whole", "srpt/tile", "s-edf/chunk:256", "s-edf/chunk:128") == [
        "fcfs/whole",
        "s-edf/chunk:256",
    ]
    assert shown("srpt/tile", "srpt/chunk:64") == ["srpt/tile", "srpt/chunk:64"]


def test_searches_are_counted_before_any_cell_is_known() -> None:
    # overall, every class of what is never chunked, objectives of s-edf
    assert (
        num_searches(("fcfs/whole", "s-edf/tile", "s-edf/chunk:64", "srpt/chunk:8"))
        == 2 + 3 + 2 + 1
    )
    assert num_searches(()) == (1 + 3 + 4 + 3) + 4 + 3


def test_the_number_of_requests_follows_from_the_time_there_is() -> None:
    trace = Path(__file__).parents[2] / "clients/traces/qwentrace_like_synthetic_10min.csv"
    some, more = (
        requests_within(seconds, trace, PAPER_PLATFORM, 1.0, num_replays=50)
        for seconds in (2000, 4000)
    )
    assert MIN_REQUESTS < some < more == pytest.approx(2 * some, rel=0.02)
    assert requests_within(1, trace, PAPER_PLATFORM, 1.0, 50) == MIN_REQUESTS
    assert requests_within(1e9, trace, PAPER_PLATFORM, 1.0, 50) == len(read_trace(trace))


def test_no_replay_finds_prompts_of_another_in_the_cache(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trace that says what its prompts share: each replay is measured as if it were alone."""
    monkeypatch.setattr(replay_records, "MAX_SEND_LAG_S", math.inf)  # none is repeated
    requests = [TraceRequest(float(i), "text", 1100, 1, (1, 2, 3 + i)) for i in range(3)]
    window = SimWindow(requests, [objective(request) for request in requests])
    plan = GoodputPlan(PAPER_PLATFORM, window, 1, {}, frozenset(), {}, 1.0)
    cell, steady = Cell("s-edf", "tile"), Pace(lambda: 1.0, 1.0)
    found = [0]
    with (
        bench_progress(None) as progress,
        contextlib.closing(
            GoodputRuns(
                load_config(tiny[0], None), plan, 0, progress, OutcomeStore(None, "key"), steady
            )
        ) as runs,
    ):
        engine, _ = runs._running(cell)
        for replay in (
            # so slow that each is answered before the next is sent
            lambda: runs.measure(cell, 1e-6),
            lambda: runs.measure(cell, 2e-6),
            lambda: runs.record(cell, 1e-6, 3),
        ):
            replay()
            found.append(engine.stats().num_cached_tokens)
    # the first two blocks of two of the three
    assert [b - a for a, b in itertools.pairwise(found)] == [2048] * 3


def test_a_small_run_has_all_figures_and_goes_on_from_its_file(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the second run is on the first one's profile, however unsteady this machine is just now
    monkeypatch.setattr(profiler, "_STEADY", math.inf)
    monkeypatch.setattr(replay_records, "MAX_SEND_LAG_S", -1.0)  # every request was sent late
    monkeypatch.setattr(pace, "MAX_TRIES", 1)
    model_json, trace = tiny
    records, pictures = tmp_path / "records.jsonl", tmp_path / "new" / "pictures"
    timeline = tmp_path / "new" / "timeline.json"
    arguments = [
        *("bench", "goodput", "--trace", str(trace), "--model-json", str(model_json)),
        *("--cells", "fcfs/whole,s-edf/chunk:32", "--requests", "60", "--blocks", "4"),
        *("--no-slo-scales", "--records", str(records)),
        *("--plots", str(pictures), "--timeline", str(timeline)),
    ]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == VOID_EXIT_CODE
    assert "VOID: requests were sent late" in run.stdout
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["void"] is True
    for name, points in result["cells"].items():
        # on both sides of the highest load, which a slow machine may not have on the grid
        assert len(points) >= 2 or points[0]["load"] == snap(MIN_LOAD), name
        assert (SCALE_LOAD in [p["load"] for p in points]) is (name == "fcfs/whole")
        assert all(set(p["attainment_by_class"]) == {"search", "text"} for p in points)
        highest, low, high = result["max_load_90"][name]
        assert low <= highest <= high or math.isclose(low, high)
    assert set(result["max_rate_90_every_class"]) == {"fcfs/whole"}
    # of a bound at the profile's speed, which a machine may exceed for so short a run
    assert all(0 < share < 2 for share in result["offline_bound_fraction"].values())
    assert result["pictures"] == ["trace_engine_rate.png", "trace_engine_ttft.png"]
    assert sorted(path.name for path in pictures.iterdir()) == result["pictures"]
    assert "timeline of fcfs/whole" in run.stderr
    trace_events = json.loads(timeline.read_text())
    tracks = check_valid(trace_events)
    check_device_does_one_thing(tracks)
    assert len(tracks) == 61
    assert trace_events["otherData"]["policy"] == "fcfs"
    num_lines = len(records.read_text().splitlines())
    assert num_lines == 1 + sum(map(len, result["cells"].values()))
    monkeypatch.setattr(replay_records, "MAX_SEND_LAG_S", math.inf)
    clean = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert clean.exit_code == 0
    again = json.loads(clean.stdout.splitlines()[-1])
    assert again["void"] is False
    for name, points in result["cells"].items():
        assert again["cells"][name] == [{**point, "void": False} for point in points]
    assert len(records.read_text().splitlines()) == num_lines
