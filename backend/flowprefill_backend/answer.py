"""The answer of one request, built up from the engine's outputs. Knows no threads and no server.

A stream takes a part per engine step, any other request one part at the end; both come from the
same accumulation, so their texts are equal.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from flowprefill.request import FinishReason, TokenOutput
from flowprefill.sampling_params import SamplingParams
from flowprefill.text_stream import TextStream
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.timing import RequestTiming

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say."""


@dataclass(frozen=True)
class AnswerOptions:
    """What the client wants to see."""

    stream: bool = False
    prepend_prompt: bool = True
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    timing: bool = False


@dataclass(frozen=True)
class AnswerPart:
    """The content of one response: what is new since the part before."""

    text: str
    finish_reason: str
    """"None" while running, then "stop" or "length"; "cancelled" for the text so far."""
    cumulative_logprob: float
    """Over all tokens so far."""
    logprobs: str
    """JSON list with one entry per new token; "null" if the sampling parameters ask for none."""
    num_input_tokens: int
    num_output_tokens: int
    """New tokens only: the sum over a stream is the total."""
    timing: dict[str, Any] | None
    """With the last part only; see RequestTiming."""


class Answer:
    """Text, counts and log-probabilities of one request."""

    def __init__(
        self,
        options: AnswerOptions,
        prompt: str,
        num_input_tokens: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        timing: RequestTiming,
    ) -> None:
        self.options = options
        self.timing = timing
        self.num_input_tokens = num_input_tokens
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._text_stream = TextStream(tokenizer, sampling)
        self._new_texts = [prompt] if options.prepend_prompt else []
        self._new_logprobs: list[dict[str, Any]] = []
        self._num_new_tokens = 0
        self._cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return self.timing.num_output_tokens

    def add(self, output: TokenOutput) -> FinishReason | None:
        """Take one engine output. Returns why the answer is complete, or None while it is not."""
        reason = output.finish_reason
        self.timing.note(output, time.monotonic())
        if output.token_id is not None:
            self._count(output)
            # EOS or a stop token: the engine knows no other way to stop.
            is_stop_token = reason is FinishReason.STOP
            delta = self._text_stream.push(output.token_id, is_stop_token)
            self._new_texts.append(delta.text)
            if delta.stopped:
                return FinishReason.STOP
        if reason is not None:
            self._new_texts.append(self._text_stream.finish())
        return reason

    def take(self, reason: FinishReason | None) -> AnswerPart:
        """What is new since the last call."""
        part = AnswerPart(
            text="".join(self._new_texts),
            finish_reason=reason.value if reason else "None",
            cumulative_logprob=self._cumulative_logprob,
            logprobs="null" if self._sampling.logprobs is None else json.dumps(self._new_logprobs),
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=self._num_new_tokens,
            timing=self.timing.to_dict(time.monotonic()) if reason else None,
        )
        self._new_texts, self._new_logprobs, self._num_new_tokens = [], [], 0
        return part

    def _count(self, output: TokenOutput) -> None:
        self._num_new_tokens += 1
        self._cumulative_logprob += output.logprob or 0.0
        if self._sampling.logprobs is not None and self.options.logprobs:
            self._new_logprobs.append(
                {
                    str(top.token_id): {
                        "logprob": max(top.logprob, MIN_LOGPROB),
                        "rank": top.rank,
                        "decoded_token": self._tokenizer.token_text(top.token_id),
                    }
                    for top in output.top_logprobs
                }
            )
