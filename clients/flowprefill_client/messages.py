"""The protobuf messages of one request and of each part of its answer. No network, no clock.

What only our models know, such as objectives, travels as request parameters, not as input
tensors: a model that does not know a parameter ignores it, while an undeclared tensor is refused,
so the same client also drives a plain vllm_backend for comparison.

An error is a response with a text but no code, so the model is asked to put the code into the text
(error_code_in_message). Triton could answer with gRPC statuses instead (header triton_grpc_error);
that is not used, because tritonserver 2.51.0 crashes when several such streams fail at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import InferResult, service_pb2

from flowprefill_client.errors import ServerError

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages, each a mapping with role and content."""

MAX_MESSAGE_BYTES = 2**31 - 1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC's own limit is two minutes without a try, long after a server has come back.
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Else gRPC's channels of one process to one address share a connection as long as it lasts."""
CONTROL_TIMEOUT_S = 10.0
"""Control requests never wait for the device, so a longer silence is a fault."""


def generate_request(
    model: str,
    prompt: Prompt,
    request_id: str,
    sampling: Mapping[str, Any],
    parameters: Mapping[str, bool | float | str | None],
) -> Any:
    """A streamed generation; returns a ModelInferRequest.

    parameters: ttft_slo_ms, tbt_slo_ms, slo_class, tenant, return_timing; None = not sent
    """
    text, form = _encode_prompt(prompt)
    request = _new_request(model, text, request_id)
    if form is not None:
        request.parameters["prompt_format"].string_param = form
    _add_string(request, "sampling_parameters", json.dumps(dict(sampling)))
    wanted = ["stream", "return_finish_reason", "return_num_input_tokens",
              "return_num_output_tokens"]  # fmt: skip
    if sampling.get("logprobs") is not None:
        wanted.append("return_logprobs")
    for name in wanted:
        tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
        tensor.contents.bool_contents.append(True)
    for name, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, str):
            request.parameters[name].string_param = value
        elif value is not None:
            request.parameters[name].double_param = value
    return request


def cancel_request(model: str, target_id: str) -> Any:
    """Ask the model to cancel the request that was sent with the id `target_id`."""
    request = _new_request(model)
    request.parameters["cancel_id"].string_param = target_id
    return request


def stats_request(model: str) -> Any:
    """Ask the model for its engine's gauges and counters."""
    request = _new_request(model)
    request.parameters["engine_stats"].bool_param = True
    return request


def state_request(model: str) -> Any:
    """Ask the model for its engine's state, which is told without the engine."""
    request = _new_request(model)
    request.parameters["engine_state"].bool_param = True
    return request


def timeline_request(model: str, seconds: float) -> Any:
    """Ask the model to record a timeline of its engine; 0 ends the one that is being recorded."""
    request = _new_request(model)
    request.parameters["record_timeline"].double_param = seconds
    return request


def parse_response(message: Any) -> dict[str, Any]:
    """Output name -> first element: str for strings, int for counts.

    Raises ServerError if the message is an error.
    """
    if message.error_message:
        raise ServerError.from_message(message.error_message)
    result = InferResult(message.infer_response)
    outputs: dict[str, Any] = {}
    for tensor in message.infer_response.outputs:
        element = result.as_numpy(tensor.name).reshape(-1)[0]
        outputs[tensor.name] = (
            element.decode("utf-8", "replace") if isinstance(element, bytes) else element.item()
        )
    return outputs


def parse_control_response(messages: list[Any]) -> str:
    """The text of the only answer to a control request. Raises ServerError if there is none."""
    texts = [parse_response(message).get("text_output") for message in messages]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ServerError(f"a control request was answered by {texts!r} instead of one text")
    return texts[0]


def parse_timeline_part(message: Any) -> dict[str, Any]:
    """One part of a timeline. Raises ServerError if the message is an error or no such part."""
    text = parse_response(message).get("text_output", "")
    try:
        part = json.loads(text)
        part["runs"], part["requests"], part["end"]
    except (ValueError, TypeError, KeyError):
        raise ServerError(f"a timeline was asked for, the answer was {text[:80]!r}") from None
    return dict(part)


def _encode_prompt(prompt: Prompt) -> tuple[str, str | None]:
    """The text that is sent, and its format; None = a text as it is."""
    if isinstance(prompt, str):
        return prompt, None
    is_messages = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    text = json.dumps(list(prompt), ensure_ascii=False, separators=(",", ":"))
    return text, "messages" if is_messages else "token_ids"


def _new_request(model: str, prompt: str = "", request_id: str = "") -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["error_code_in_message"].bool_param = True
    _add_string(request, "text_input", prompt)
    return request


def _add_string(request: Any, name: str, text: str) -> None:
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
