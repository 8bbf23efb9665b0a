"""Requests that must be refused, by protocol, and the word that each refusal must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flowprefill.bench.soak.asking import MODEL_NAME

GENERATE, COMPLETIONS = "generate", "completions"
"""The two routes that they go to."""


@dataclass(frozen=True)
class BadRequest:
    """One that must be refused."""

    route: str
    data: bytes
    word: str
    status: int = 400
    """On the OpenAI endpoint. Triton's HTTP port has other ones for the same faults."""

    def fault(self, status: int, text: str) -> str | None:
        """What is wrong with this answer to it; None if it is refused as it must be."""
        error = error_of(text)
        is_status = status == self.status if self.route == COMPLETIONS else status >= 400
        if is_status and error and self.word in error:
            return None
        return f"{self.data[:80]!r} was answered {status}, {text!r}"


def _generate(word: str, **fields: Any) -> BadRequest:
    return BadRequest(GENERATE, json.dumps({"text_input": "Hello", **fields}).encode(), word)


def _sampling(word: str, **values: Any) -> BadRequest:
    return _generate(word, sampling_parameters=json.dumps(values))


def _completion(word: str, status: int = 400, **fields: Any) -> BadRequest:
    body = {"model": MODEL_NAME, "prompt": "Hello", **fields}
    return BadRequest(COMPLETIONS, json.dumps(body).encode(), word, status)


def error_of(text: str) -> str:
    """The error in a JSON body of either server; "" if it is none."""
    try:
        error = json.loads(text).get("error", "")
    except (ValueError, AttributeError):
        return ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


BAD_REQUESTS = (
    _generate("text_input", text_input=""),
    _generate("max_model_len", text_input="word " * 9_000),
    _generate("text_input", text_input="x" * 2_000_000),
    _generate("ttft_slo_ms", ttft_slo_ms=-1.0),
    _generate("slo_class", slo_class="no such class"),
    _sampling("no_such_key", no_such_key=1),
    _sampling("top_p", top_p=7),
    _sampling("temperature", temperature=float("nan")),
    _sampling("stop_token_ids", stop_token_ids=[2**40]),
    _sampling("best_of", best_of=4),
    _sampling("max_model_len", max_tokens=100_000),
    _generate("sampling_parameters", sampling_parameters="{"),
    BadRequest(GENERATE, b"{no json", ""),
    BadRequest(GENERATE, b"\xff\xfe\x00", ""),
    _completion("prompt", prompt=[999_999]),
    _completion("prompt", prompt=[-1]),
    _completion("temperature", temperature="warm"),
    _completion("logit_bias", logit_bias={"999999": 1}),
    _completion("no such model", 404, model="no such model"),
    BadRequest(COMPLETIONS, b"{no json", "body"),
    BadRequest(COMPLETIONS, b" " * (9 * 2**20), "body", 413),
)
