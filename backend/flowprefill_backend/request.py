"""Tensors and parameters of a request -> what the engine takes. Knows no engine and no threads.

On the thread of execute(), `read` copies plain values out of the server's objects, `screen` refuses
what is too big to be kept waiting, and `control` recognises requests that are answered at once.
`parse` checks everything else and tokenises; it may take milliseconds and runs on a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowprefill.config import EngineConfig
from flowprefill.errors import (
    FlowPrefillError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from flowprefill.request import MAX_NAME_CHARS, SLO
from flowprefill.sampling_params import SamplingParams, is_unicode
from flowprefill.stats import EngineInfo
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.answer import AnswerOptions
from flowprefill_backend.contract import UNSUPPORTED_INPUTS
from flowprefill_backend.prompt import JSON_GROWTH, MESSAGES, TEXT, prompt_format, read_prompt

CANCEL_ID = "cancel_id"
ENGINE_STATS = "engine_stats"
ENGINE_STATE = "engine_state"
RECORD_TIMELINE = "record_timeline"
NAMES_ERROR_CODE = "error_code_in_message"
"""Request parameter of callers inside the server, to whom only an error's text arrives."""
RETURN_TIMING = "return_timing"
"""An input, and a request parameter for clients that do not know if the model has that input."""
MAX_TIMELINE_S = 60.0
MAX_PARAMETERS_BYTES = 2**20
"""JSON text of the sampling parameters, and of the request's parameters, at most."""


class LoraDisabledError(FlowPrefillError):
    """A LoRA adapter was asked for; the text is vllm_backend's."""

    code = "UNSUPPORTED"
    reject_reason = "unsupported"

    def __init__(self) -> None:
        super().__init__("LoRA feature is not enabled.")


@dataclass(frozen=True)
class RawRequest:
    """Plain values of one Triton request; keeps none of the server's objects alive."""

    arrival_s: float
    """CLOCK_MONOTONIC seconds at which execute() was entered."""
    triton_id: str
    """The client's own id; "" when it sent none."""
    inputs: Mapping[str, list[Any]]
    """Flattened elements of each input that was sent: bytes, bool or float."""
    parameters: Mapping[str, Any]
    num_bytes: int
    """Size of all that it holds, about."""

    @property
    def names_error_code(self) -> bool:
        return self.parameters.get(NAMES_ERROR_CODE) is True


@dataclass(frozen=True)
class ParsedRequest:
    """A request that passed every check."""

    prompt: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    slo: SLO
    tenant: str
    options: AnswerOptions


@dataclass(frozen=True)
class Control:
    """A request to the backend itself; its text_input is not looked at."""

    cancel_id: str | None = None
    """Triton id of the live request to cancel."""
    timeline_s: float | None = None
    """Record so long; 0: end the recording that runs."""
    wants_state: bool = False
    """engine_state is asked for; without any of these: engine_stats."""


def read(request: Any, arrival_s: float) -> RawRequest:
    """Copy a pb_utils.InferenceRequest; its arrays are freed on this thread of Python's.

    Raises InvalidRequestError for more than MAX_PARAMETERS_BYTES of request parameters, and for an
    id that is no UTF-8.
    """
    inputs = {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}
    parameters = str(request.parameters() or "{}")
    _check_size("request parameters", len(parameters.encode()), MAX_PARAMETERS_BYTES)
    num_bytes = len(parameters) + sum(_num_bytes(elements) for elements in inputs.values())
    try:
        triton_id = str(request.request_id())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the request's id must be UTF-8: {error}") from error
    return RawRequest(arrival_s, triton_id, inputs, json.loads(parameters), num_bytes)


def screen(raw: RawRequest, info: EngineInfo, tokenizer: Tokenizer) -> None:
    """Raise FlowPrefillError for inputs that need no parsing to be refused."""
    for name in UNSUPPORTED_INPUTS:
        size = _num_bytes(raw.inputs.get(name, ()))
        if size:
            raise UnsupportedFeatureError(name, f"{size} bytes")
    size = _num_bytes(raw.inputs.get("sampling_parameters", ()))
    _check_size("sampling_parameters", size, MAX_PARAMETERS_BYTES)
    size = _num_bytes(raw.inputs.get("text_input", ()))
    max_bytes = info.max_model_len * tokenizer.max_token_bytes
    if prompt_format(raw.parameters) != TEXT:
        max_bytes *= JSON_GROWTH
    if size > max_bytes:
        raise PromptTooLongError(
            f"text_input has {size} bytes: max_model_len {info.max_model_len} tokens hold at "
            f"most {max_bytes}"
        )


def control(raw: RawRequest) -> Control | None:
    """The control request that `raw` is, or None. Raises InvalidParameterError naming the field."""
    cancel_id = raw.parameters.get(CANCEL_ID)
    if _mentions(raw, CANCEL_ID):
        # A broken text is no control request; parse() is the one to say what is wrong with it.
        try:
            cancel_id = _sampling_values(raw).get(CANCEL_ID, cancel_id)
        except InvalidRequestError:
            return None
    if cancel_id is not None:
        is_id = isinstance(cancel_id, (str, int)) and not isinstance(cancel_id, bool)
        if not is_id or cancel_id == "":
            raise InvalidParameterError(CANCEL_ID, cancel_id, "the id of a request")
        return Control(cancel_id=str(cancel_id))
    if (seconds := raw.parameters.get(RECORD_TIMELINE)) is not None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= MAX_TIMELINE_S:
            limit = f"seconds, 0 (which ends a recording) to {MAX_TIMELINE_S:g}"
            raise InvalidParameterError(RECORD_TIMELINE, seconds, limit)
        return Control(timeline_s=float(seconds))
    if _is_true(raw, ENGINE_STATE):
        return Control(wants_state=True)
    return Control() if _is_true(raw, ENGINE_STATS) else None


def parse(
    raw: RawRequest, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer
) -> ParsedRequest:
    """Check and tokenise what `screen` let pass. Raises FlowPrefillError naming field and limit."""
    options = _options(raw)
    values = _sampling_values(raw)
    slo = config.slo(
        _text(raw, values, "slo_class"),
        _slo_ms(raw, values, "ttft_slo_ms"),
        _slo_ms(raw, values, "tbt_slo_ms"),
    )
    tenant = _text(raw, values, "tenant") or ""
    if values.pop("lora_name", None):
        raise LoraDisabledError
    form = prompt_format(raw.parameters)
    text = _decode("text_input", _element(raw, "text_input"))
    token_ids = read_prompt(text, form, tokenizer, info.vocab_size)
    if form == MESSAGES and values.get("max_tokens") is None:
        values["max_tokens"] = _room(len(token_ids), info)
    sampling = SamplingParams.from_mapping(
        values,
        vocab_size=info.vocab_size,
        # Without the tensor the values are the request's parameters, where generic clients put
        # whatever they like.
        ignore_unknown="sampling_parameters" not in raw.inputs,
    )
    if len(token_ids) + sampling.max_tokens > info.max_model_len:
        raise PromptTooLongError(
            f"prompt of {len(token_ids)} tokens + max_tokens={sampling.max_tokens} > "
            f"max_model_len {info.max_model_len}"
        )
    if form != TEXT:  # what an answer begins with that is to hold its prompt
        text = tokenizer.decode(token_ids, False) if options.prepend_prompt else ""
    return ParsedRequest(text, token_ids, sampling, slo, tenant, options)


def _room(num_prompt: int, info: EngineInfo) -> int:
    """Tokens that an answer may have behind a prompt; 1 where none fits, which is refused later."""
    limit = min(info.max_model_len, info.num_kv_blocks * info.block_size)
    return max(1, limit - num_prompt)


def _options(raw: RawRequest) -> AnswerOptions:
    stream = bool(_element(raw, "stream", False))
    exclude_prompt = bool(_element(raw, "exclude_input_in_output", stream))
    if stream and not exclude_prompt:
        raise InvalidRequestError(
            "When streaming, `exclude_input_in_output` = False is not allowed."
        )
    return AnswerOptions(
        stream=stream,
        prepend_prompt=not exclude_prompt,
        finish_reason=bool(_element(raw, "return_finish_reason", False)),
        cumulative_logprob=bool(_element(raw, "return_cumulative_logprob", False)),
        logprobs=bool(_element(raw, "return_logprobs", False)),
        num_input_tokens=bool(_element(raw, "return_num_input_tokens", False)),
        num_output_tokens=bool(_element(raw, "return_num_output_tokens", False)),
        timing=bool(_element(raw, RETURN_TIMING, raw.parameters.get(RETURN_TIMING) is True)),
    )


def _sampling_values(raw: RawRequest) -> dict[str, Any]:
    """The sampling_parameters text if it was sent, else the request's parameters; never both."""
    if "sampling_parameters" not in raw.inputs:
        return dict(raw.parameters)
    text = _decode("sampling_parameters", _element(raw, "sampling_parameters"))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidParameterError("sampling_parameters", text, "the JSON text of one object")
    return values


def _take(raw: RawRequest, values: dict[str, Any], name: str) -> Any:
    """Key of sampling_parameters > request parameter; None if neither was sent."""
    in_sampling = values.pop(name, None)
    return raw.parameters.get(name) if in_sampling is None else in_sampling


def _slo_ms(raw: RawRequest, values: dict[str, Any], name: str) -> float | None:
    """Input tensor > key of sampling_parameters > request parameter, milliseconds, or None."""
    parameter = _take(raw, values, name)
    value = _element(raw, name, parameter)
    return None if value is None else _number(name, value)


def _text(raw: RawRequest, values: dict[str, Any], name: str) -> str | None:
    value = _take(raw, values, name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not is_unicode(value):
        raise InvalidParameterError(name, value, f"a text of at most {MAX_NAME_CHARS} characters")
    return value


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameterError(name, value, "a number of milliseconds") from None


_REQUIRED = object()


def _element(raw: RawRequest, name: str, default: Any = _REQUIRED) -> Any:
    """The only element of an input, or `default` when it was not sent."""
    elements = raw.inputs.get(name)
    if elements is None and default is not _REQUIRED:
        return default
    if elements is None or len(elements) != 1:
        raise InvalidParameterError(name, elements, "a tensor of one element")
    return elements[0]


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        limit = f"valid UTF-8 (byte {error.start} is not)"
        raise InvalidParameterError(name, value[error.start : error.start + 8], limit) from error


def _num_bytes(elements: Sequence[Any]) -> int:
    return sum(len(element) for element in elements if isinstance(element, bytes))


def _check_size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidRequestError(f"{name}: {size} bytes; must be at most {limit} bytes")


def _is_true(raw: RawRequest, parameter: str) -> bool:
    return str(raw.parameters.get(parameter, "")).lower() in ("true", "1")


def _mentions(raw: RawRequest, key: str) -> bool:
    """Whether the sampling_parameters text may hold `key`: spares execute() parsing every text."""
    needle = f'"{key}"'.encode()
    return any(needle in text for text in raw.inputs.get("sampling_parameters", ()))
