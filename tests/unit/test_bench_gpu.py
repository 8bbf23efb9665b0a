"""`bench gpu-check` and `bench gpu-bench`: stages and their time, checks, and both dry runs."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from flowprefill.bench.decode import Lengths
from flowprefill.bench.goodput_outcomes import Outcome
from flowprefill.bench.gpu import bench, checks, measure, report
from flowprefill.bench.gpu.checks import Check, NotChecked, run_checks
from flowprefill.bench.gpu.goodput import summarise
from flowprefill.bench.gpu.measure import Sizes, shares_of_rest
from flowprefill.bench.gpu.program_checks import refusing_to_synchronise
from flowprefill.bench.gpu.random_model import RandomModel, load_random_model, weight_bytes
from flowprefill.bench.gpu.reference import Reference
from flowprefill.bench.gpu.shapes import LLAMA_3_1_8B, SMALL_DRY, TINY
from flowprefill.bench.gpu.stages import Budget, Stages
from flowprefill.bench.prefill import random_tokens
from flowprefill.bench.prefill_modes import with_whole_operators
from flowprefill.bench.progress import bench_progress
from flowprefill.cli import app
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.predictor.profile import Profile
from flowprefill.programs.model_spec import read_model_spec
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import Group
from flowprefill.simulator.data_sheets import LLAMA_3_1_8B as PAPER_SPEC
from tests.unit.programs.runs import Runner

NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: no dry run")
QWEN2 = {
    **TINY,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def make_stages(path: Path | None = None, seconds: float = 100.0, **shares: float) -> Stages:
    said: list[str] = []
    return Stages(seconds, shares, {"seed": 0}, path, said.append, is_dry_run=False)


class TestStages:
    def test_what_is_left_is_divided_by_the_shares_to_come(self) -> None:
        stages = make_stages(seconds=100.0, one=1.0, two=3.0)
        given: list[float] = []

        def note(budget: Budget) -> dict[str, Any]:
            given.append(budget.left_s)
            return {}

        stages.run("one", note)  # takes no time, so all of it is left to the next
        stages.run("two", note)
        assert given == [pytest.approx(25.0, abs=5.0), pytest.approx(100.0, abs=5.0)]

    def test_without_time_a_stage_is_cut_and_said_to_be(self) -> None:
        stages = make_stages(seconds=-1.0, one=1.0)
        assert stages.run("one", lambda budget: {"never": 1}) is None
        assert stages.cut == ["one: all of it"] and stages.figures == {}

    def test_a_failed_stage_costs_only_its_own_figures(self) -> None:
        stages = make_stages(one=1.0, two=1.0)

        def fail(budget: Budget) -> dict[str, Any]:
            raise RuntimeError("CUDA out of memory")

        stages.run("one", fail)
        stages.run("two", lambda budget: {"figure": 2})
        assert stages.failed == {"one": "RuntimeError: CUDA out of memory"}
        assert stages.to_json()["two"] == {"figure": 2}

    def test_figures_are_on_disk_before_the_next_stage_begins(self, tmp_path: Path) -> None:
        path = tmp_path / "results" / "gpu.json"
        stages = make_stages(path, one=1.0, two=1.0)
        stages.run("one", lambda budget: {"figure": 1})

        def look(budget: Budget) -> dict[str, Any]:
            return {"found": json.loads(path.read_text())["one"]}

        assert stages.run("two", look) == {"found": {"figure": 1}}

    def test_a_part_that_would_not_fit_is_cut_by_its_name(self) -> None:
        cut: list[str] = []
        budget = Budget(5.0, cut.append)
        assert budget.allows("short", 1.0) and not budget.allows("long", 10.0)
        assert cut == ["long"]
        assert budget.part(0.5).left_s == pytest.approx(2.5, abs=1.0)


def test_of_several_things_each_gets_its_share_of_what_is_left() -> None:
    left, given = 60.0, []
    for share in shares_of_rest([3, 2, 1]):
        given.append(left * share)
        left -= given[-1]
    assert given == pytest.approx([30.0, 20.0, 10.0])


class TestChecks:
    def test_whatever_fails_the_others_run(self) -> None:
        def fail() -> str:
            raise ValueError("one\n\ntwo")

        def skip() -> str:
            raise NotChecked("no triton")

        made = [Check("a", fail), Check("b", lambda: "fine"), Check("c", skip)]
        findings = run_checks(made, lambda name: None)
        outcomes = [(f.name, f.outcome, f.detail) for f in findings]
        assert outcomes == [
            ("a", "failed", "ValueError: one two"),
            ("b", "passed", "fine"),
            ("c", "not checked", "no triton"),
        ]
        assert checks.to_json(findings)["num_failed"] == 1
        assert checks.make_table(findings, "title").row_count == 3

    def test_a_wrong_kernel_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rmsnorm = pytest.importorskip("flowprefill.kernels.rmsnorm")
        kernel_checks = pytest.importorskip("flowprefill.bench.gpu.kernel_checks")
        right = rmsnorm.rmsnorm
        monkeypatch.setattr(rmsnorm, "rmsnorm", lambda x, w, eps: right(x, w, eps) * 1.001)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made = [c for c in kernel_checks.kernel_checks(device) if c.name.startswith("rmsnorm")]
        findings = run_checks(made[:1], lambda name: None)
        assert findings[0].outcome == "failed" and "not close" in findings[0].detail


def test_the_mode_in_which_waits_are_errors_is_left_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch warns once that it is a prototype, when it is set already."""
    modes: list[int | str] = [0]

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(RuntimeError, match="a wait"), refusing_to_synchronise():
        raise RuntimeError("a wait")
    assert modes == [0, "error", 0]


class TestRandomModel:
    def load(self, shapes: dict[str, Any], folder: Path) -> tuple[Any, Any]:
        settings = {
            "device": "cpu",
            "dtype": "float32",
            "kernels": "torch",
            "num_threads": 1,
            "kv_cache_memory_bytes": 2**20,
        }
        _, model, weights = load_random_model(shapes, settings, folder, 0, lambda s, f: None)
        return model, weights

    def test_parked_prefills_are_counted_without_those_of_the_granularity_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, weights = self.load(dict(TINY), tmp_path)
        random_model = RandomModel(EngineConfig("m"), model, Profile([], [], True, 0.0), weights)
        alive: weakref.WeakSet[ProgramState] = weakref.WeakSet()
        start = model.program.prefill

        def prefill(inputs: Sequence[SequenceInput], granularity: Granularity) -> ProgramState:
            state: ProgramState = start(inputs, granularity)
            alive.add(state)
            return state

        monkeypatch.setattr(model.program, "prefill", prefill)
        monkeypatch.setattr(
            measure, "_allocated", lambda device: sum(state.live_bytes for state in alive)
        )
        sizes = Sizes((128,), 1, 1, 1, (1,), Lengths(8, 8), parked=2)
        with bench_progress(None) as progress:
            found = measure.measure_parked(random_model, sizes, progress, Budget(100.0, print))
        for granularity in ("tile", "op"):
            one = found[granularity]
            assert one["allocated_bytes_each"] == one["live_bytes_each"] > 0

    @pytest.mark.parametrize("shapes", [TINY, SMALL_DRY, QWEN2])
    def test_the_reference_gives_the_logits_of_ours(
        self, shapes: dict[str, Any], tmp_path: Path
    ) -> None:
        pytest.importorskip("transformers")
        model, weights = self.load(shapes, tmp_path)
        reference = Reference(shapes, model, weights)
        prompt = random_tokens(model.spec.vocab_size, 90, 0)
        theirs = reference.logits(prompt)
        assert theirs.std() > 0.1  # else all logits would be near all others
        torch.testing.assert_close(Runner(model).prefill(prompt), theirs, atol=1e-4, rtol=1e-4)
        assert reference.prefill_s(prompt) > 0

    def test_the_authors_way_has_one_slice_for_each_operator_of_a_prompt(
        self, tmp_path: Path
    ) -> None:
        model, _ = self.load(dict(TINY), tmp_path)
        usual = model.program.limits
        program = with_whole_operators(model.program, 600)
        prompt = SequenceInput([1] * 600, 0, Runner(model, num_sequences=1).tables[0])
        state = program.prefill([prompt], Granularity.parse("op"))
        groups = []
        while not state.is_done:
            groups.append(state.next_slice.group)
            assert state.next_slice.num_rows in (1, 600)
            state.run_slice()
        assert groups == [Group.QKV, Group.ATTENTION, Group.MLP, Group.QKV, Group.HEAD]
        assert model.program.limits == usual

    def test_its_bytes_are_those_of_its_tensors(self, tmp_path: Path) -> None:
        model, weights = self.load(dict(TINY), tmp_path)
        matrices = [weights.embed, weights.lm_head]
        for layer in weights.layers:
            matrices += [layer.qkv, layer.o_proj, layer.gate_up, layer.down]
        assert weight_bytes(model.spec, torch.float32) == sum(m.nbytes for m in matrices)

    def test_the_large_one_has_the_shapes_of_the_data_sheet(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(dict(LLAMA_3_1_8B)))
        spec = read_model_spec(tmp_path)
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "vocab_size", "rope_theta"):  # fmt: skip
            assert getattr(spec, name) == getattr(PAPER_SPEC, name), name
        assert spec.rope_scaling and spec.rope_scaling.kind == "llama3"
        assert weight_bytes(spec, torch.bfloat16) == pytest.approx(16.06e9, rel=0.001)


class TestBars:
    figures: ClassVar[dict[str, Any]] = {
        "blocking": {"tile": {"32768": {"p99_ms": 1.6}}},
        "prefill": {
            "sliced_ratio": {"32768": 0.995, "2048": 0.5},
            "peer_ratio": {"transformers, sdpa": {"2048": [0.89], "32768": [1.1]}},
        },
        "parked": {"tile": {"share": 0.01}, "num_parked": 8, "num_tokens": 32768},
    }

    def test_each_is_held_to_its_limit(self) -> None:
        bars = report.find_bars(self.figures, 32768, is_dry_run=False)
        assert [(b.measured, b.is_met) for b in bars] == [
            (1.6, False), (0.995, True), (0.89, False), (1.1, True), (0.01, True)
        ]  # fmt: skip

    def test_of_a_dry_run_none_is_judged(self) -> None:
        bars = report.find_bars(self.figures, 32768, is_dry_run=True)
        assert len(bars) == 5 and all(bar.limit is None and bar.is_met for bar in bars)

    def test_stages_that_were_cut_have_none(self) -> None:
        assert report.find_bars({"blocking": {}, "prefill": {}}, 32768, is_dry_run=False) == []


@NO_CARD
def test_gpu_check_without_a_card_is_a_dry_run_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    run = CliRunner().invoke(app, ["bench", "gpu-check", "--json-out", str(path)])
    assert run.exit_code == 0, run.output
    assert run.stdout.count(report.DRY_RUN) == 2
    result = json.loads(run.stdout.splitlines()[-1])
    assert result == json.loads(path.read_text())
    assert result["is_dry_run"] and "checks" not in result
    found = {check["name"]: check["outcome"] for check in result["dry_run"]["checks"]}
    assert found["no slice synchronises"] == "not checked"
    assert found["engine: a preempted prompt's tokens"] == "passed"
    outcomes = set(found.values())
    assert outcomes <= {"passed", "not checked"}
    if result["run"]["triton"]:
        assert found["parked anywhere, the same bits"] == "passed"
        assert found["decode attention, head_dim 256, float32"] == "passed"


@pytest.mark.gpu
def test_gpu_check_finds_nothing_wrong_on_a_card() -> None:
    run = CliRunner().invoke(app, ["bench", "gpu-check"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout.splitlines()[-1])
    assert not result["is_dry_run"]
    assert {check["outcome"] for check in result["checks"]} == {"passed"}


@NO_CARD
def test_gpu_check_fails_with_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowprefill.bench.gpu import check

    finding = checks.Finding("a kernel", "failed", "wrong", 0.0)
    monkeypatch.setattr(check, "find", lambda device: [finding])
    run = CliRunner().invoke(app, ["bench", "gpu-check"])
    assert run.exit_code == 1
    assert json.loads(run.stdout.splitlines()[-1])["dry_run"]["num_failed"] == 1


def test_a_cell_whose_requests_were_sent_late_is_void() -> None:
    ttft = {"text": [0.1, 0.2]}
    late = Outcome({"text": 2}, {"text": 2}, ttft, send_lags_s=[0.006, 0.006])
    figures = summarise(late, [], 1.0)
    assert (figures["send_lag_p99_ms"], figures["void"]) == (6.0, True)
    facts = {"num_requests": 2, "trace": "t.csv", "load": 1.0, "offered_per_s": 2.0}
    [table] = report.make_tables({"goodput": {"cells": {"s-edf/tile": figures}, **facts}})
    assert list(table.columns[-1].cells) == ["6.0 ms, void"]


@NO_CARD
def test_gpu_bench_without_a_card_is_a_dry_run_of_all_stages(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run = CliRunner().invoke(app, ["bench", "gpu-bench", "--json-out", str(path)])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout.splitlines()[-1])
    assert result == json.loads(path.read_text())
    assert result["is_dry_run"] and "prefill" not in result and result["failed"] == {}
    assert report.DRY_RUN in run.stdout
    figures = result["dry_run"]
    assert figures.keys() == {"prefill", "blocking", "decode", "parked", "goodput", "bars"}
    assert figures["blocking"].keys() == {"tile", "op", "layer", "op, synchronised"}
    assert figures["prefill"]["sliced_ratio"].keys() == {"128", "512"}
    assert set(figures["decode"]["tokens_per_s"]) == {"1", "2"}
    assert len(figures["goodput"]["cells"]) == 5
    assert all(cell["send_lag_p99_ms"] >= 0 for cell in figures["goodput"]["cells"].values())
    assert all(bar["limit"] is None for bar in figures["bars"])
    assert result["run"]["shapes"] == TINY and result["run"]["model"] == "random weights, tiny"


@NO_CARD
@pytest.mark.parametrize(("p99_ms", "exit_code"), [(1.4, 0), (1.6, 1)])
def test_gpu_bench_fails_with_its_bars(
    p99_ms: float, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are judged as those of a card are."""
    figures = {"blocking": {"tile": {"512": {"p99_ms": p99_ms}}}}
    monkeypatch.setattr(
        bench, "find_bars", lambda of, longest, is_dry_run: report.find_bars(figures, 512, False)
    )
    run = CliRunner().invoke(app, ["bench", "gpu-bench", "--seconds", "1"])
    assert run.exit_code == exit_code, run.output
    [bar] = json.loads(run.stdout.splitlines()[-1])["dry_run"]["bars"]
    assert bar["is_met"] == (exit_code == 0)
