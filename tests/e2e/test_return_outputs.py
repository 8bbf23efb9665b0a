"""vllm_backend's return_* inputs in every combination of presence: each answers for itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from flowprefill.server import TritonServer
from tests.e2e.conftest import MODEL

PROMPT = b"The capital of France is"
NUM_TOKENS = 2
NAMES = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens",
         "num_output_tokens", "timing")  # fmt: skip
TYPES = {"text_output": "BYTES", "finish_reason": "BYTES", "cumulative_logprob": "FP32",
         "logprobs": "BYTES", "num_input_tokens": "UINT32", "num_output_tokens": "UINT32",
         "timing": "BYTES"}  # fmt: skip
COMBINATIONS = [
    names for size in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, size)
]


def request_for(flags: dict[str, bool], stream: bool | None) -> Any:
    """None: the input `stream` is not sent."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    for name, text in (("text_input", PROMPT), ("sampling_parameters", json.dumps(sampling))):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text if isinstance(text, bytes) else text.encode())
    flags = {f"return_{name}": value for name, value in flags.items()}
    if stream is not None:
        flags["stream"] = stream
    for name, value in flags.items():
        tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
        tensor.contents.bool_contents.append(value)
    return request


def ask(stub: Any, request: Any) -> list[dict[str, Any]]:
    """Of each response: output name -> its only element, types and shapes checked."""
    responses = []
    for message in stub.ModelStreamInfer(iter([request]), timeout=60):
        assert message.error_message == ""
        result = grpcclient.InferResult(message.infer_response)
        outputs = {}
        for tensor in message.infer_response.outputs:
            assert (tensor.datatype, list(tensor.shape)) == (TYPES[tensor.name], [1])
            element = result.as_numpy(tensor.name)[0]
            outputs[tensor.name] = element.decode() if isinstance(element, bytes) else element
        responses.append(outputs)
    return responses


@pytest.mark.parametrize("stream", [True, False, None])
@pytest.mark.parametrize("others", [None, False], ids=["others absent", "others false"])
def test_each_combination_returns_what_was_asked_for_and_nothing_else(
    server: TritonServer, stream: bool | None, others: bool | None
) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        everything = ask(stub, request_for(dict.fromkeys(NAMES, True), stream))
        for names in COMBINATIONS:
            flags = {} if others is None else dict.fromkeys(NAMES, others)
            flags.update(dict.fromkeys(names, True))
            responses = ask(stub, request_for(flags, stream))
            assert_as_asked(responses, names, bool(stream))
            for some, full in zip(responses, everything, strict=True):
                for name in some.keys() - {"timing"}:  # the same value in all company
                    assert some[name] == full[name], (names, name)


def assert_as_asked(responses: list[dict[str, Any]], names: Sequence[str], stream: bool) -> None:
    *before, last = responses
    assert len(responses) == (NUM_TOKENS if stream else 1)
    assert set(last) == {"text_output", *names}
    assert all(set(response) == {"text_output", *names} - {"timing"} for response in before)
    text = "".join(response["text_output"] for response in responses)
    assert text.startswith(PROMPT.decode()) is not stream and len(text) > 1
    if "finish_reason" in names:
        reasons = [response["finish_reason"] for response in responses]
        assert reasons == ["None"] * len(before) + ["length"]
    if "num_output_tokens" in names:
        assert sum(response["num_output_tokens"] for response in responses) == NUM_TOKENS
    if "num_input_tokens" in names:
        assert {response["num_input_tokens"] for response in responses} == {5}
    if "cumulative_logprob" in names:
        sums = [response["cumulative_logprob"] for response in responses]
        assert sums == sorted(sums, reverse=True) and sums[-1] < 0
    if "logprobs" in names:
        tokens = [t for response in responses for t in json.loads(response["logprobs"])]
        assert len(tokens) == NUM_TOKENS
    if "timing" in names:
        assert json.loads(last["timing"])["num_output_tokens"] == NUM_TOKENS
