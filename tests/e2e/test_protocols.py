"""Every way in gives the same answer: generate, SSE, gRPC streams, and the synchronous facade."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from flowprefill.server import TritonServer
from flowprefill_client import Client
from tests.e2e.conftest import MODEL, SYNC_MODEL

PROMPT = "The capital of France is"
GREEDY = {"max_tokens": 12, "temperature": 0}


def post(url: str, body: dict[str, Any]) -> bytes:
    """Body of the reply, errors included."""
    request = urllib.request.Request(f"http://{url}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


@pytest.fixture(scope="module")
def greedy_text(server: TritonServer) -> str:
    """The continuation that all protocols must give."""
    with Client(server.grpc_url, MODEL) as client:
        return client.generate(PROMPT, sampling=GREEDY).text


def test_generate_puts_the_prompt_in_front_by_default(
    server: TritonServer, greedy_text: str
) -> None:
    body = {"text_input": PROMPT, "id": "mine", **GREEDY}
    reply = json.loads(post(f"{server.http_url}/v2/models/{MODEL}/generate", body))
    assert reply["text_output"] == PROMPT + greedy_text
    assert "Paris" in greedy_text
    assert reply["id"] == "mine" and reply["model_name"] == MODEL


def test_generate_reports_what_was_asked_for(server: TritonServer, greedy_text: str) -> None:
    body = {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "parameters": GREEDY,
    }
    reply = json.loads(post(f"{server.http_url}/v2/models/{MODEL}/generate", body))
    assert reply["text_output"] == greedy_text
    assert reply["finish_reason"] == "length"
    assert (reply["num_input_tokens"], reply["num_output_tokens"]) == (5, 12)
    assert "logprobs" not in reply


def test_generate_stream_sends_one_event_per_token(server: TritonServer, greedy_text: str) -> None:
    body = {"text_input": PROMPT, "stream": True, "return_num_output_tokens": True, **GREEDY}
    raw = post(f"{server.http_url}/v2/models/{MODEL}/generate_stream", body).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == greedy_text
    assert [event["num_output_tokens"] for event in events] == [1] * 12


@pytest.mark.parametrize("others", [{}, {"return_finish_reason": True, "return_logprobs": True}])
@pytest.mark.parametrize("stream", [True, False])
def test_timing_comes_with_the_last_response_and_adds_up(
    server: TritonServer, stream: bool, others: dict[str, bool]
) -> None:
    body = {"text_input": PROMPT, "stream": stream, "return_timing": True, "slo_class": "chat"}
    url = f"{server.http_url}/v2/models/{MODEL}/generate{'_stream' if stream else ''}"
    begin_s = time.monotonic()
    raw = post(url, {**body, **GREEDY, **others}).decode()
    took_s = time.monotonic() - begin_s
    *before, last = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line]
    assert len(before) == (11 if stream else 0)
    assert not any("timing" in event for event in before)
    assert {"finish_reason", "logprobs"} & set(last) == {n.removeprefix("return_") for n in others}
    timing = json.loads(last["timing"])
    assert 0 < timing["queue_s"] < timing["ttft_s"] < timing["e2e_s"] < took_s
    assert 0 < timing["prefill_s"] < timing["ttft_s"] - timing["queue_s"]
    assert timing["is_on_time"] is (timing["ttft_s"] <= 0.25)
    named = {name: timing[name] for name in ("num_output_tokens", "slo_class", "ttft_slo_ms")}
    assert named == {"num_output_tokens": 12, "slo_class": "chat", "ttft_slo_ms": 250}
    assert (timing["num_preemptions"], timing["num_cached_tokens"]) == (0, 0)


def text_tensor(module: Any, name: str, text: str) -> Any:
    tensor = module.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def test_tritonclient_grpc_streams(grpc: Any, greedy_text: str) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put((result, error)))
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    inputs = [
        text_tensor(grpcclient, "text_input", PROMPT),
        text_tensor(grpcclient, "sampling_parameters", json.dumps(GREEDY)),
        stream,
    ]
    grpc.async_stream_infer(MODEL, inputs, request_id="7", enable_empty_final_response=True)
    texts, is_final = [], False
    while not is_final:
        result, error = answers.get(timeout=60)
        assert error is None
        response = result.get_response()
        assert response.id == "7"
        is_final = response.parameters["triton_final_response"].bool_param
        if response.outputs:
            texts.append(result.as_numpy("text_output")[0].decode())
    grpc.stop_stream()
    assert len(texts) == 12 and "".join(texts) == greedy_text


@pytest.mark.parametrize("flavour", ["http", "grpc"])
def test_facade_answers_plain_infer(flavour: str, http: Any, grpc: Any, greedy_text: str) -> None:
    client, module = (http, httpclient) if flavour == "http" else (grpc, grpcclient)
    inputs = [
        text_tensor(module, "text_input", PROMPT),
        text_tensor(module, "sampling_parameters", json.dumps(GREEDY)),
    ]
    result = client.infer(SYNC_MODEL, inputs)
    assert result.as_numpy("text_output")[0].decode() == PROMPT + greedy_text


def test_facade_passes_errors_on(http: Any) -> None:
    inputs = [
        text_tensor(httpclient, "text_input", PROMPT),
        text_tensor(httpclient, "sampling_parameters", json.dumps({"top_p": 7})),
    ]
    with pytest.raises(httpclient.InferenceServerException, match="top_p"):
        http.infer(SYNC_MODEL, inputs)
