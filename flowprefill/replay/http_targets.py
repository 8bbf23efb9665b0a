"""Targets that answer by server-sent events: Triton's generate_stream, OpenAI's completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from flowprefill.replay.errors import ReplayError, TargetError
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.targets import SAMPLING, Part, objectives_ms
from flowprefill_client import ServerError

_MAX_ERROR_CHARS = 300


class _EventSource:
    """Posts JSON and reads the events that come back."""

    def __init__(self) -> None:
        # A connection for each request: none ever waits for another's, and none is sent into a
        # kept-open connection that the server is just closing.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)  # the replay has its own
        headers = {"Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    async def get_status(self, url: str) -> int:
        """Raises ReplayError if nobody answers."""
        try:
            async with self._session.get(url) as response:
                return response.status
        except (aiohttp.ClientError, OSError) as error:
            raise ReplayError(f"{url}: {error}") from error

    async def events(self, url: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
        """JSON objects of the events up to the end or `[DONE]`. Raises TargetError."""
        try:
            async with self._session.post(url, data=body) as response:
                if response.status != 200:
                    raise _error_of(f"HTTP_{response.status}", await response.text())
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield _parse_event(data)
        except (aiohttp.ClientError, OSError) as error:
            raise TargetError("UNAVAILABLE", str(error) or type(error).__name__) from error
        except ValueError as error:  # a line longer than any event is
            raise TargetError("BAD_ANSWER", str(error)) from error

    async def close(self) -> None:
        await self._session.close()


def _parse_event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise TargetError("BAD_ANSWER", f"event {data[:_MAX_ERROR_CHARS]!r}")
    if event.get("error"):
        raise _error_of("ERROR", data.decode(errors="replace"))
    return event


def _error_of(code: str, text: str) -> TargetError:
    """The error in a JSON body or event of Triton's or OpenAI's, or in any other text."""
    message = text = text.strip().removeprefix("data:").strip()
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(text).get("error", text)
        message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    named = ServerError.from_message(message)
    return TargetError(named.status or code, str(named)[:_MAX_ERROR_CHARS])


def _base_url(url: str) -> str:
    """With a scheme, and no slash at its end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


class GenerateStreamTarget:
    """A Triton model over HTTP."""

    def __init__(self, url: str, model: str) -> None:
        """url: of the server, as host:port or http://host:port"""
        self._model_url = f"{_base_url(url)}/v2/models/{model}"
        self._source = _EventSource()

    async def check(self) -> None:
        status = await self._source.get_status(f"{self._model_url}/ready")
        if status != 200:
            raise ReplayError(f"{self._model_url}: the model is not ready (HTTP {status})")

    def prepare(self, planned: PlannedRequest, prompt: str) -> bytes:
        sampling = {**SAMPLING, "max_tokens": planned.output_tokens}
        body = {
            "text_input": prompt,
            "stream": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "return_timing": True,
            "sampling_parameters": json.dumps(sampling),
            "error_code_in_message": True,
            **objectives_ms(planned),
        }
        return json.dumps(body).encode()

    async def send(self, message: bytes) -> AsyncIterator[Part]:
        is_complete = False
        async for event in self._source.events(f"{self._model_url}/generate_stream", message):
            # vllm_backend's word for "still running" is the text None
            is_complete = event.get("finish_reason", "None") not in ("None", None)
            timing = json.loads(event.get("timing", "{}"))
            yield Part(
                event.get("num_output_tokens", 1),
                event.get("num_input_tokens"),
                server_ttft_s=timing.get("ttft_s"),
            )
        if not is_complete:
            raise TargetError("INCOMPLETE", "the stream ended before the answer did")

    async def close(self) -> None:
        await self._source.close()


class OpenAITarget:
    """Any server of OpenAI's /v1/completions that streams."""

    def __init__(
        self, url: str, model: str, send_slo: bool = False, send_priority: bool = False
    ) -> None:
        """url: of the server, or of its API as far as /v1 or /completions

        send_slo: with ttft_slo_ms and tbt_slo_ms
        send_priority: with the deadline of the first token as vLLM's `priority`, lower goes first
        """
        url = _base_url(url)
        is_api = url.endswith(("/v1", "/completions"))
        self._base = url.removesuffix("/completions") if is_api else f"{url}/v1"
        self._model = model
        self._send_slo = send_slo
        self._send_priority = send_priority
        self._source = _EventSource()

    async def check(self) -> None:
        # That somebody answers is enough: small servers have no list of models.
        await self._source.get_status(f"{self._base}/models")

    def prepare(self, planned: PlannedRequest, prompt: str) -> bytes:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": planned.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **SAMPLING,
            **(objectives_ms(planned) if self._send_slo else {}),
            **({"priority": _deadline_ms(planned)} if self._send_priority else {}),
        }
        return json.dumps(body).encode()

    async def send(self, message: bytes) -> AsyncIterator[Part]:
        is_complete = False
        async for event in self._source.events(f"{self._base}/completions", message):
            usage = event.get("usage") or {}
            choice = next(iter(event.get("choices") or ()), None)
            num_tokens = 0
            if choice is not None:
                is_last = choice.get("finish_reason") is not None
                is_complete = is_complete or is_last
                # A token may have no text of its own; the last message may have no token.
                num_tokens = 1 if choice.get("text") or not is_last else 0
            yield Part(num_tokens, usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if not is_complete:
            raise TargetError("INCOMPLETE", "the stream ended before the answer did")

    async def close(self) -> None:
        await self._source.close()


def _deadline_ms(planned: PlannedRequest) -> int:
    """When the first token is due, from the start of the replay."""
    return round(1000 * (planned.due_s + planned.objective.ttft_s))
