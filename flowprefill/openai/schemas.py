"""The bodies of requests. Types are checked here, values by the backend, which knows the limits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
"""Go to the model under the same name."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False


class GenerationRequest(BaseModel):
    """What both kinds of requests share: OpenAI's fields, vLLM's additions, and our objectives."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: Any = None
    """Checked in translate.py: a union gives errors that name its parts instead of the field."""
    user: str | None = None
    """Has no effect; `tenant` has."""

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None
    slo_class: str | None = None
    tenant: str | None = None
    request_id: str | None = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Any = None
    """Checked in translate.py: a union of lists gives errors that nobody can read."""
    logprobs: int | None = None


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Any = None
    """Checked in translate.py."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
