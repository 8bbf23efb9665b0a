"""Bad requests name field, value and limit, and touch nobody else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from flowprefill.server import TritonServer
from flowprefill_client import Client, Completion, ServerError
from tests.e2e.conftest import MODEL

CONTROL_PROMPT = "A short story about a lighthouse keeper:"
CONTROL = {"temperature": 0, "max_tokens": 96, "ignore_eos": True}

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"no_such_key": 1}, "no_such_key"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_model_len"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"stop": 7}, "stop"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logprobs": -1}, "logprobs"),
    ({"seed": "x"}, "seed"),
    ({"n": 2}, "n="),
    ({"best_of": 4}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
]
BAD_SLOS = [0.0, -1.0, float("nan"), float("inf"), 1e12]


@pytest.fixture(scope="module")
def control(server: TritonServer) -> Completion:
    with Client(server.grpc_url, MODEL) as client:
        return client.generate(CONTROL_PROMPT, sampling=CONTROL)


@pytest.fixture(autouse=True, scope="module")
def neighbours(server: TritonServer, control: Completion) -> Any:
    """Streams that run while all bad requests of this module are sent, and stay as they were."""
    done = threading.Event()
    texts: list[str] = []

    def run() -> None:
        with Client(server.grpc_url, MODEL) as client:
            while not done.is_set():
                texts.append(client.generate(CONTROL_PROMPT, sampling=CONTROL).text)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    done.set()
    thread.join(60)
    assert texts and all(text == control.text for text in texts)


@pytest.mark.parametrize(("sampling", "named"), BAD_SAMPLING, ids=str)
def test_bad_sampling_parameter_is_named(
    client: Client, sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServerError, match=named):
        client.generate("Hello", sampling=sampling)


@pytest.mark.parametrize("field", ["ttft_slo_ms", "tbt_slo_ms"])
@pytest.mark.parametrize("value", BAD_SLOS)
def test_bad_objective_is_named(client: Client, field: str, value: float) -> None:
    with pytest.raises(ServerError, match=field):
        client.generate("Hello", sampling={field: value})


def test_empty_prompt_is_refused(client: Client) -> None:
    with pytest.raises(ServerError, match="text_input"):
        client.generate("")


def test_too_long_prompt_names_the_limit(client: Client) -> None:
    with pytest.raises(ServerError, match="8192"):
        client.generate("word " * 9000)


def test_oversize_text_is_refused_by_its_bytes(client: Client) -> None:
    with pytest.raises(ServerError, match=r"text_input has 30000000 bytes"):
        client.generate("x" * 30_000_000)


def raw_error(client: Client, request: Any) -> str:
    """Error of a request that our client would not build."""
    messages = list(client._stub.ModelStreamInfer(iter([request]), timeout=30))
    assert len(messages) == 1
    return str(messages[0].error_message)


def text_request(text: bytes) -> Any:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text)
    return request


def add_bool(request: Any, name: str, value: bool) -> None:
    tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(value)


def test_invalid_utf8_is_refused(client: Client) -> None:
    assert "text_input" in raw_error(client, text_request(b"caf\xe9 \xff"))


def test_streaming_with_the_prompt_in_the_output_is_refused(client: Client) -> None:
    request = text_request(b"Hello")
    add_bool(request, "stream", True)
    add_bool(request, "exclude_input_in_output", False)
    assert raw_error(client, request) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_images_are_refused_by_name(client: Client) -> None:
    request = text_request(b"Hello")
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"aGVsbG8=")
    assert "image" in raw_error(client, request)
