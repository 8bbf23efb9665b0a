"""Exceptions of FlowPrefill. Each carries the status code that a client sees.

FlowPrefillError                    INTERNAL
├── InvalidRequestError             INVALID_ARG   a request that can never be served as it is
│   ├── InvalidParameterError       INVALID_ARG   names field, value and limit
│   ├── PromptTooLongError          INVALID_ARG   prompt + max_tokens over max_model_len
│   └── EngineKillerError           INVALID_ARG   the engine died with it, twice
├── UnsupportedFeatureError         UNSUPPORTED   names the field
├── UnavailableError                UNAVAILABLE   try again later
│   ├── QueueFullError              UNAVAILABLE
│   ├── QueueTimeoutError           UNAVAILABLE   it did not start within queue_timeout_ms
│   ├── InfeasibleError             UNAVAILABLE   it cannot be on time any more (on_infeasible)
│   └── EngineDeadError             UNAVAILABLE   the engine process died with the request in it
├── RequestCancelledError           CANCELLED
├── ConfigError                     INVALID_ARG   a broken model.json; fails the load
├── ModelLoadError                  INTERNAL      weights or tokenizer that cannot be used
│   ├── UnsupportedArchitectureError
│   │   └── UnsupportedVariantError
│   └── UnsupportedTokenizerError
└── ServerStartError                INTERNAL      tritonserver cannot be started
"""

from __future__ import annotations


def shorten(text: str, max_chars: int = 80) -> str:
    """The beginning of `text`; what UTF-8 cannot hold (lone surrogates) becomes "?"."""
    shown = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return shown.encode("utf-8", "replace").decode("utf-8")


class FlowPrefillError(Exception):
    """Base of all errors raised on purpose. `code` is the TritonError code name."""

    code = "INTERNAL"
    reject_reason: str | None = None
    """In metrics, why such a request was refused; None = it failed."""


class InvalidRequestError(FlowPrefillError):
    """A request that can never be served as it is."""

    code = "INVALID_ARG"
    reject_reason = "invalid"


class InvalidParameterError(InvalidRequestError):
    """One field of a request has a wrong type or value."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={shorten(repr(value))}: must be {limit}")
        self.field = field


class PromptTooLongError(InvalidRequestError):
    """Prompt plus requested tokens do not fit into the model's context."""


class EngineKillerError(InvalidRequestError):
    """The engine died whenever it had this request."""


class UnsupportedFeatureError(FlowPrefillError):
    """A feature that vllm_backend declares and FlowPrefill does not have."""

    code = "UNSUPPORTED"
    reject_reason = "unsupported"

    def __init__(self, field: str, value: object) -> None:
        super().__init__(f"{field}={shorten(repr(value))} is not supported")
        self.field = field


class UnavailableError(FlowPrefillError):
    """The request cannot be taken now; a later try may succeed."""

    code = "UNAVAILABLE"
    reject_reason: str | None = "unavailable"


class QueueFullError(UnavailableError):
    """The admission bound is reached."""

    reject_reason = "queue_full"


class QueueTimeoutError(UnavailableError):
    """The request has waited too long for its start."""

    reject_reason = "queue_timeout"


class InfeasibleError(UnavailableError):
    """The request cannot be on time any more."""

    reject_reason = "infeasible"


class EngineDeadError(UnavailableError):
    """The engine process ended while the request was in it."""

    reject_reason = None


class RequestCancelledError(FlowPrefillError):
    """The client cancelled the request."""

    code = "CANCELLED"


class ConfigError(FlowPrefillError):
    """model.json is broken; the message names the key."""

    code = "INVALID_ARG"


class ModelLoadError(FlowPrefillError):
    """Weights or tokenizer cannot be used."""


class UnsupportedArchitectureError(ModelLoadError):
    """No program exists for the model's architecture."""


class UnsupportedVariantError(UnsupportedArchitectureError):
    """The program of the model's architecture cannot run this variant of it."""


class UnsupportedTokenizerError(ModelLoadError):
    """The tokenizer's model or pre-tokenizer is not known exactly."""


class ServerStartError(FlowPrefillError):
    """tritonserver cannot be started; the message says what is missing."""
