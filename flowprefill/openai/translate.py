"""Bodies -> what the client library sends. Pure; values are the backend's to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowprefill.openai.errors import ApiError
from flowprefill.openai.schemas import (
    SAMPLING_FIELDS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from flowprefill.sampling_params import UNSUPPORTED_FEATURES
from flowprefill_client import Prompt

MAX_CHOICES = 128
"""Prompts of one request times `n`, at most: each is a request of its own to the model."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that would change the answer and are not there -> values that ask for nothing."""
_PROMPT_LIMIT = "a text, a list of texts, a list of token ids, or a list of such lists; not empty"

COMPLETION_FIELDS = {"text_input": "prompt"}
"""The backend's names of fields -> a completion's, where they differ."""


@dataclass(frozen=True)
class Generation:
    """One request to the model: one choice of the answer."""

    prompt: Prompt
    max_tokens: int | None
    """None: the model's default; of a chat, up to the end of its context."""
    sampling: dict[str, Any]


def completion_generations(request: CompletionRequest) -> list[Generation]:
    """One per prompt and choice, the choices of a prompt side by side. Raises ApiError."""
    prompts = _prompts(request.prompt)
    return _generations(request, prompts, request.max_tokens, request.logprobs)


def chat_generations(request: ChatRequest) -> list[Generation]:
    """One per choice. Raises ApiError."""
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise ApiError.invalid("top_logprobs", request.top_logprobs, "used with logprobs=true")
    return _generations(request, [_messages(request.messages)], max_tokens, logprobs)


def chat_fields(request: ChatRequest) -> dict[str, str]:
    """The backend's names of fields -> a chat's, where they differ."""
    has_new_name = request.max_completion_tokens is not None
    return {
        "text_input": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens" if has_new_name else "max_tokens",
    }


def unknown_fields(request: GenerationRequest) -> list[str]:
    """Fields without meaning here, which are passed over."""
    known = (*_UNSUPPORTED, *UNSUPPORTED_FEATURES)
    return [name for name in request.model_extra or {} if name not in known]


def _generations(
    request: GenerationRequest,
    prompts: list[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
) -> list[Generation]:
    extra = request.model_extra or {}
    for name, neutral in _UNSUPPORTED.items():
        if extra.get(name) is not None and extra[name] not in neutral:
            raise ApiError.unsupported(name, extra[name])
    if request.stream_options is not None and not request.stream:
        value = request.stream_options.model_dump()
        raise ApiError.invalid("stream_options", value, "used with stream=true")
    n = 1 if request.n is None else request.n
    most = MAX_CHOICES // len(prompts)
    if not 1 <= n <= most:
        of_prompts = f" for {len(prompts)} prompts" if len(prompts) > 1 else ""
        raise ApiError.invalid("n", n, f"an integer in [1, {most}]{of_prompts}")
    sampling = _sampling(request)
    # The backend says which of vLLM's features it lacks.
    sampling |= {name: extra[name] for name in UNSUPPORTED_FEATURES if name in extra}
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    return [
        Generation(prompt, max_tokens, _with_seed(sampling, number))
        for prompt in prompts
        for number in range(n)
    ]


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    values = {name: getattr(request, name) for name in SAMPLING_FIELDS}
    values["stop"] = _stop(request.stop)
    return {name: value for name, value in values.items() if value is not None}


def _stop(value: Any) -> list[str] | None:
    # A single text that spells a JSON list would be taken for that list.
    texts = [value] if isinstance(value, str) else value
    if texts is not None and not (
        isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    ):
        raise ApiError.invalid("stop", value, "a text or a list of texts")
    return texts


def _with_seed(sampling: dict[str, Any], number: int) -> dict[str, Any]:
    """The choices of one prompt differ, with a seed too."""
    seed = sampling.get("seed")
    return sampling if seed is None else {**sampling, "seed": seed + number}


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ApiError.invalid("prompt", value, _PROMPT_LIMIT)
    if _is_token_ids(value):
        return [value]
    if len(value) > MAX_CHOICES:
        raise ApiError.invalid("prompt", f"{len(value)} prompts", f"at most {MAX_CHOICES} prompts")
    for index, item in enumerate(value):
        is_prompt = isinstance(item, str) or (isinstance(item, list) and _is_token_ids(item))
        if not is_prompt or type(item) is not type(value[0]):
            raise ApiError.invalid(f"prompt[{index}]", item, f"part of {_PROMPT_LIMIT}")
    return value


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _messages(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ApiError.invalid("messages", value, "a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(field: str, message: Any) -> dict[str, Any]:
    """Role, content as one text, and the name; what is null is left out."""
    if not isinstance(message, dict):
        raise ApiError.invalid(field, message, "an object with role and content")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise ApiError.unsupported(f"{field}.{name}", message[name])
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(f"{field}.content", *entry) for entry in enumerate(content))
    kept = {"role": message.get("role"), "content": content, "name": message.get("name")}
    return {name: value for name, value in kept.items() if value is not None}


def _part(field: str, index: int, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ApiError.unsupported(f"{field}[{index}].type", kind)
