"""Other engines beside ours: how they are named, a real one in its process, its weights."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flowprefill.bench.peers import export_hf
from flowprefill.bench.peers.process import Peer, start_peers
from flowprefill.bench.peers.spec import Conditions, PeerSpec, read_peers
from flowprefill.bench.report import BenchmarkError
from flowprefill.cli import app
from flowprefill.config import EngineConfig
from flowprefill.programs.model_spec import read_model_spec
from flowprefill.programs.weights import load_weights
from tests.factories import TINY_VOCAB_SIZE, write_tiny_gguf, write_tiny_model

CONDITIONS = Conditions(TINY_VOCAB_SIZE, "float32", num_threads=1, max_model_len=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def transformers_peer(model: Path) -> PeerSpec:
    return PeerSpec("reference", Path(sys.executable), model, "transformers")


# ---- names --------------------------------------------------------------------------------------


def test_peers_are_read_from_options_and_from_a_file(model: Path, tmp_path: Path) -> None:
    config, file = EngineConfig(str(model)), tmp_path / "peers.json"
    entry = {"name": "vllm-2048", "python": sys.executable, "worker": "vllm", "model": str(model),
             "options": {"max_num_batched_tokens": 2048}}  # fmt: skip
    file.write_text(json.dumps([entry]))
    texts = [f"transformers={sys.executable}", f"openvino={sys.executable}:{model}"]
    peers = read_peers(texts, file, config)
    assert [p.name for p in peers] == ["transformers", "openvino", "vllm-2048"]
    assert [p.worker for p in peers] == ["transformers", "openvino", "vllm"]
    assert {p.model for p in peers} == {model}  # ours, if none is named
    assert peers[2].options == {"max_num_batched_tokens": 2048}
    assert read_peers(None, None, config) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vllm", "must be NAME=PYTHON"),
        (f"llama={sys.executable}", "must be one of openvino, vllm, transformers"),
        ("vllm=/no/python", "no interpreter /no/python"),
        (f"vllm={sys.executable}:/no/model", "needs a model folder"),
    ],
)
def test_a_mistake_in_a_peer_is_named(model: Path, text: str, problem: str) -> None:
    with pytest.raises(BenchmarkError, match=problem):
        read_peers([text], None, EngineConfig(str(model)))


def test_a_name_given_twice_and_a_broken_file_are_refused(model: Path, tmp_path: Path) -> None:
    config, text = EngineConfig(str(model)), f"transformers={sys.executable}"
    with pytest.raises(BenchmarkError, match="given twice"):
        read_peers([text, text], None, config)
    file = tmp_path / "peers.json"
    for content, problem in (("{", "not readable"), ("{}", "a list"), ('[{"name": 1}]', "needs")):
        file.write_text(content)
        with pytest.raises(BenchmarkError, match=problem):
            read_peers(None, file, config)


def test_peers_run_as_our_engine_does() -> None:
    config = EngineConfig("m", num_threads=3)
    assert Conditions.of(config, 10, "torch.bfloat16", 20) == Conditions(10, "bfloat16", 3, 20)
    assert Conditions.of(EngineConfig("m"), 10, "float32", 20).num_threads == len(
        os.sched_getaffinity(0)
    )


# ---- a process ----------------------------------------------------------------------------------


def wait_stopped(peer: Peer) -> None:
    """Returns when the process has been stopped; each stop is told once."""
    assert os.waitid(os.P_PID, peer._process.pid, os.WSTOPPED)


def test_a_peer_measures_when_asked_and_stands_still_in_between(model: Path) -> None:
    with start_peers([transformers_peer(model)], CONDITIONS) as (peer,):
        assert peer.version.startswith("transformers ")
        wait_stopped(peer)
        assert 0 < peer.prefill_s(200, seed=1) < 60
        assert 0 < peer.decode_s(200, decode=4, seed=1) < 60
        wait_stopped(peer)
    assert peer._process.returncode == 0


def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)reference has died; its last lines:.*Error"):
        Peer(transformers_peer(tmp_path), CONDITIONS)


def test_a_peer_that_dies_is_named(model: Path) -> None:
    with (
        start_peers([transformers_peer(model)], CONDITIONS) as (peer,),
        pytest.raises(BenchmarkError, match="reference has died"),
    ):
        os.kill(peer._process.pid, signal.SIGKILL)
        peer.prefill_s(10, seed=0)


def test_prefill_and_decode_measure_a_peer_beside_ours(model: Path, tmp_path: Path) -> None:
    model_json = tmp_path / "model.json"
    config = {"model": str(model), "num_threads": 1, "dtype": "float32"}
    model_json.write_text(json.dumps(config))
    shared = ["--model-json", str(model_json), "--rounds", "1",
              "--peer", f"transformers={sys.executable}"]  # fmt: skip
    for arguments, key in (
        (["prefill", "--lengths", "32"], "32"),
        (["decode", "--batch", "1", "--tokens", "8", "--context", "16"], "1"),
    ):
        run = CliRunner().invoke(app, ["bench", *arguments, *shared], catch_exceptions=False)
        result = json.loads(run.stdout.splitlines()[-1])
        assert result["peers"]["transformers"][key] > 0
        assert result["run"]["peers"]["transformers"].startswith("transformers")


# ---- weights ------------------------------------------------------------------------------------


def test_an_exported_folder_holds_the_weights_that_we_run(model: Path, tmp_path: Path) -> None:
    gguf, out = write_tiny_gguf(tmp_path / "tiny.gguf", model, quant="Q8_0"), tmp_path / "hf"
    spec = read_model_spec(gguf)
    weights = load_weights(gguf, spec, torch.float32)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(export_hf.hf_keys(spec)))
    from safetensors.torch import save_file

    save_file(export_hf.hf_tensors(weights, spec), out / "model.safetensors")
    exported_spec = read_model_spec(out)
    exported = load_weights(out, exported_spec, torch.float32)
    assert vars(exported_spec) | {"architecture": "llama"} == vars(spec)
    assert torch.equal(exported.embed, weights.embed)
    assert torch.equal(exported.lm_head, weights.lm_head)
    for ours, theirs in zip(weights.layers, exported.layers, strict=True):
        for name, tensor in vars(ours).items():
            assert tensor is None or torch.equal(tensor, getattr(theirs, name)), name


def test_a_folder_in_use_or_a_folder_model_is_not_exported(model: Path, tmp_path: Path) -> None:
    model_json = tmp_path / "model.json"
    model_json.write_text(json.dumps({"model": str(model)}))
    with pytest.raises(BenchmarkError, match="Hugging Face folder already"):
        export_hf.run(tmp_path / "out", model_json)
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", model)
    model_json.write_text(json.dumps({"model": str(gguf)}))
    with pytest.raises(BenchmarkError, match="not empty"):
        export_hf.run(tmp_path, model_json)
