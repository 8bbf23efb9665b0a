"""An answer as it comes in: Delta, a part of it; Completion, the whole; Recorder in between."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from flowprefill_client.errors import ServerError
from flowprefill_client.messages import parse_response


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token at one position."""

    token_id: int
    text: str
    """Has U+FFFD where the token is part of a character."""
    logprob: float
    rank: int
    """1 = the most likely token."""


@dataclass(frozen=True)
class Delta:
    """One part of a streamed answer."""

    text: str
    """New text; may be empty, as a token can be half a character."""
    num_output_tokens: int
    """New tokens of this part."""
    finish_reason: str | None
    """None while more follows; then stop or length."""
    time_s: float
    """From sending the request to receiving this part, seconds."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """With the sampling parameter logprobs: of each new token itself, then the most likely ones."""


@dataclass(frozen=True)
class Completion:
    """A whole answer, or what came of it before it was cancelled."""

    request_id: str
    text: str
    finish_reason: str | None
    """stop, length, cancelled; None while it is not complete."""
    num_input_tokens: int | None
    """None if nothing was received."""
    num_output_tokens: int
    ttft_s: float | None
    """From sending the request to its first token, seconds; None if nothing was received."""
    delta_times_s: tuple[float, ...]
    """When each part was received, seconds after sending."""
    timing: dict[str, Any] | None = None
    """With return_timing, once complete: the server's own times and counts of this request, as
    queue_s, prefill_s, ttft_s, num_preemptions; all of them are in the project's README."""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """As of Delta, of all tokens."""


class Recorder:
    """Turns the messages of one stream into deltas and adds them up."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finish_reason: str | None = None
        self._num_input_tokens: int | None = None
        self._timing: dict[str, Any] | None = None
        self._deltas: list[Delta] = []
        self._sent_s = time.monotonic()

    def add(self, message: Any) -> Delta:
        """Take one ModelStreamInferResponse. Raises ServerError if it carries an error."""
        time_s = time.monotonic() - self._sent_s
        outputs = parse_response(message)
        reason = outputs.get("finish_reason", "None")
        if reason != "None":  # vllm_backend's word for "still running"
            self.finish_reason = reason
        self._num_input_tokens = outputs.get("num_input_tokens")
        if "timing" in outputs:
            self._timing = json.loads(outputs["timing"])
        delta = Delta(
            text=outputs.get("text_output", ""),
            num_output_tokens=outputs.get("num_output_tokens", 0),
            finish_reason=self.finish_reason,
            time_s=time_s,
            logprobs=_parse_logprobs(outputs.get("logprobs")),
        )
        self._deltas.append(delta)
        return delta

    def check_complete(self) -> None:
        """The stream has ended. Raises ServerError if the answer has not."""
        if self.finish_reason is None:
            raise ServerError("the server closed the stream before the answer was complete")

    def completion(self) -> Completion:
        """All that was received so far."""
        times = tuple(delta.time_s for delta in self._deltas)
        return Completion(
            request_id=self.request_id,
            text="".join(delta.text for delta in self._deltas),
            finish_reason=self.finish_reason,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=sum(delta.num_output_tokens for delta in self._deltas),
            ttft_s=times[0] if times else None,
            delta_times_s=times,
            timing=self._timing,
            logprobs=tuple(token for delta in self._deltas for token in delta.logprobs),
        )


def _parse_logprobs(text: str | None) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The model's JSON: for each new token a map from ids, the token itself first."""
    tokens = json.loads(text) if text else None
    return tuple(
        tuple(
            TokenLogprob(int(token_id), top["decoded_token"], top["logprob"], top["rank"])
            for token_id, top in token.items()
        )
        for token in tokens or ()
    )


class Exchange:
    """A request and what came back so far: what the streams of both clients share."""

    def __init__(self, call: Any, request_id: str) -> None:
        """call: the gRPC call of ModelStreamInfer, blocking or asyncio."""
        self._call = call
        self._recorder = Recorder(request_id)
        self._is_cancelled = False
        self._is_over = False  # the last message was received

    @property
    def request_id(self) -> str:
        """What the client's cancel() takes."""
        return self._recorder.request_id

    def cancel(self) -> None:
        """Tell the server to drop the request; the iteration ends. From any thread, at any time.

        An AsyncStream belongs to its event loop; cancel it there.
        """
        if self._recorder.finish_reason is None and not self._is_over:
            self._is_cancelled = True
            self._recorder.finish_reason = "cancelled"
            self._call.cancel()

    def completion(self) -> Completion:
        """What was received so far."""
        return self._recorder.completion()
