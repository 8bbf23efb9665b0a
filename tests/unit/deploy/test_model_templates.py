"""Templates of models for a card: they say what an engine takes; nobody serves them unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flowprefill.config import EngineConfig
from flowprefill.errors import ModelLoadError
from flowprefill.programs.model_spec import read_model_spec, resolve_model_path
from flowprefill.server_layout import default_model_repository
from tests.factories import write_tiny_model
from tests.unit.deploy.deploy_files import DOCKER, ROOT

TEMPLATES = DOCKER / "models"
ARCHITECTURES = {"llama-3.1-8b": "llama", "qwen2.5-14b": "qwen2"}
"""Templates, and the architecture of the model that each is for."""


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_template_is_known() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == set(ARCHITECTURES)


def test_a_template_is_a_model_folder_like_the_default_one(name: str) -> None:
    default = ROOT / "model_repository" / "smollm2" / "config.pbtxt"
    assert (TEMPLATES / name / "config.pbtxt").read_text() == default.read_text()
    assert [path.name for path in (TEMPLATES / name / "1").iterdir()] == ["model.json"]


def test_a_template_runs_bf16_on_a_card_from_a_mounted_folder(name: str) -> None:
    config, without_effect = EngineConfig.from_file(TEMPLATES / name / "1" / "model.json")
    assert without_effect == []
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert config.with_absolute_paths(TEMPLATES).model == f"/models/{name}"


def test_the_model_is_looked_for_where_the_template_says(name: str) -> None:
    config, _ = EngineConfig.from_file(TEMPLATES / name / "1" / "model.json")
    with pytest.raises(ModelLoadError, match=f"/models/{name}"):
        resolve_model_path(config.model)


def test_a_copy_of_it_loads_a_model_of_its_architecture(name: str, tmp_path: Path) -> None:
    """All that is changed is what stands for the card and the folder."""
    from flowprefill.bench.session import Session
    from flowprefill.request import SLO

    folder = tmp_path / "model_repository" / name
    shutil.copytree(TEMPLATES / name, folder)
    model = write_tiny_model(
        tmp_path / "tiny", ARCHITECTURES[name], num_layers=2, hidden=32, max_len=32_768
    )
    path = folder / "1" / "model.json"
    values = json.loads(path.read_text())
    values |= {"model": str(model), "device": "cpu", "dtype": "float32", "kernels": "torch"}
    values |= {"num_threads": 1, "kv_cache_memory_bytes": 2**20}
    path.write_text(json.dumps(values))
    config, _ = EngineConfig.from_file(path)
    assert read_model_spec(model).max_position_embeddings == config.max_model_len
    assert config.slo("chat").ttft_s < config.slo().ttft_s < config.slo("document").ttft_s
    with Session(config, 0, lambda stage, fraction: None) as session:
        assert session.engine.info.max_model_len == config.max_model_len
        answer = session.submit(session.random_prompt(5), SLO(60.0, 60.0), max_tokens=2)
        assert len(session.wait_end(answer).token_ids) == 2


def test_the_default_repository_holds_no_template() -> None:
    served = {path.name for path in default_model_repository().iterdir()}
    assert served.isdisjoint(ARCHITECTURES)
