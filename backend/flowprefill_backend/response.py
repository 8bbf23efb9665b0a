"""Answers and errors -> pb_utils.InferenceResponse, each sent once: send() alters the object."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from flowprefill.errors import FlowPrefillError, RequestCancelledError, shorten
from flowprefill_backend.answer import AnswerOptions, AnswerPart
from flowprefill_backend.request import LoraDisabledError

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

MAX_ERROR_CHARS = 1_000

_TEXT_AS_IT_IS = (RequestCancelledError, LoraDisabledError)
"""Errors to which vllm_backend adds no prefix."""


def text_response(text: str) -> Any:
    """A response with nothing but text_output."""
    return pb_utils.InferenceResponse(output_tensors=[_strings("text_output", text)])


def part_response(part: AnswerPart, options: AnswerOptions) -> Any:
    """One part of an answer, with the extra outputs that the client asked for."""
    tensors = [_strings("text_output", part.text)]
    if options.finish_reason:
        tensors.append(_strings("finish_reason", part.finish_reason))
    if options.cumulative_logprob:
        value = np.array([part.cumulative_logprob], dtype=np.float32)
        tensors.append(pb_utils.Tensor("cumulative_logprob", value))
    if options.logprobs:
        tensors.append(_strings("logprobs", part.logprobs))
    if options.num_input_tokens:
        tensors.append(_count("num_input_tokens", part.num_input_tokens))
    if options.num_output_tokens:
        tensors.append(_count("num_output_tokens", part.num_output_tokens))
    if options.timing and part.timing is not None:
        tensors.append(_strings("timing", json.dumps(part.timing)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def error_response(error: Exception, names_code: bool = False) -> Any:
    """An error under its TritonError code; anything that is not ours is INTERNAL.

    names_code puts the code's name into the text as well, as in "[UNAVAILABLE] the queue is full":
    calls between models lose the code itself.
    """
    code = error.code if isinstance(error, FlowPrefillError) else "INTERNAL"
    text = str(error) if isinstance(error, FlowPrefillError) else repr(error)
    if not isinstance(error, _TEXT_AS_IT_IS):
        text = f"Error generating stream: {text}"
    if names_code:
        text = f"[{code}] {text}"
    return pb_utils.InferenceResponse(
        output_tensors=[_strings("text_output", "N/A")],
        error=pb_utils.TritonError(
            shorten(text, MAX_ERROR_CHARS),
            getattr(pb_utils.TritonError, code, pb_utils.TritonError.INTERNAL),
        ),
    )


def _strings(name: str, text: str) -> Any:
    # An object array keeps trailing NULs, which numpy's own string types drop.
    return pb_utils.Tensor(name, np.array([text.encode("utf-8", "replace")], dtype=np.object_))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.uint32))
