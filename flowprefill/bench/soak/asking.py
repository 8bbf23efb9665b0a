"""One request over each of the server's protocols: its answer, or AnswerError with what was said.

An answer must have as many tokens as were asked for: what is sent here ignores the end of text.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

    from flowprefill.bench.soak.rig import SoakServer
    from flowprefill_client import AsyncClient

MODEL_NAME = "soak"


class AnswerError(Exception):
    """The server answered with an error, or broke an answer off."""

    @property
    def is_engine_lost(self) -> bool:
        """The engine died with the request in it."""
        return "engine process" in str(self)

    @property
    def is_suspected(self) -> bool:
        """Two engines died with the request in them."""
        return "died twice" in " ".join(str(self).split())


@dataclass(frozen=True)
class Ask:
    """What is asked for, in no protocol's words."""

    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]
    slo: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A whole one, in no protocol's words."""

    text: str
    num_tokens: int
    """As the server counts them."""


class Asker:
    """Sends requests. Belongs to one event loop."""

    def __init__(
        self, server: SoakServer, client: AsyncClient, session: aiohttp.ClientSession
    ) -> None:
        self.server = server
        self.client = client
        self.session = session

    async def grpc(self, ask: Ask) -> Answer:
        from flowprefill_client import ServerError

        try:
            answer = await self.client.generate(
                ask.prompt, max_tokens=ask.max_tokens, sampling=ask.sampling, **ask.slo
            )
        except ServerError as error:
            raise AnswerError(str(error)) from error
        return Answer(answer.text, answer.num_output_tokens)

    async def generate_stream(self, ask: Ask) -> Answer:
        sampling = {**ask.sampling, "max_tokens": ask.max_tokens}
        body = {"text_input": ask.prompt, "stream": True, "return_finish_reason": True,
                "return_num_output_tokens": True,
                "sampling_parameters": json.dumps(sampling), **ask.slo}  # fmt: skip
        url = f"{self.server.http_url}/generate_stream"
        events = [event async for event in self._events(url, body)]
        if not events or events[-1]["finish_reason"] == "None":
            raise AnswerError("the stream ended before the answer did")
        text = "".join(event["text_output"] for event in events)
        return Answer(text, sum(event["num_output_tokens"] for event in events))

    async def completion(self, ask: Ask) -> Answer:
        status, text = await self.post(self._completions_url, json.dumps(_body(ask)).encode())
        if status != 200:
            raise AnswerError(text)
        reply = json.loads(text)
        return Answer(reply["choices"][0]["text"], reply["usage"]["completion_tokens"])

    async def completion_stream(self, ask: Ask) -> Answer:
        body = {**_body(ask), "stream": True, "stream_options": {"include_usage": True}}
        events = [event async for event in self._events(self._completions_url, body)]
        choices = [choice for event in events for choice in event["choices"]]
        if not choices or choices[-1]["finish_reason"] is None or not events[-1]["usage"]:
            raise AnswerError("the stream ended before the answer did")
        text = "".join(choice["text"] for choice in choices)
        return Answer(text, events[-1]["usage"]["completion_tokens"])

    @property
    def _completions_url(self) -> str:
        return f"{self.server.openai_url}/completions"

    async def post(self, url: str, data: bytes) -> tuple[int, str]:
        """Status and body, whatever they are."""
        import aiohttp

        headers = {"content-type": "application/json"}
        try:
            async with self.session.post(url, data=data, headers=headers) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            raise AnswerError(repr(error)) from error

    async def _events(self, url: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        import aiohttp

        try:
            async with self.session.post(url, json=body) as response:
                if response.status != 200:
                    raise AnswerError(await response.text())
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise AnswerError(data.decode())
                    yield event
        except aiohttp.ClientError as error:
            raise AnswerError(repr(error)) from error


def _body(ask: Ask) -> dict[str, Any]:
    """As OpenAI's completions take it."""
    return {"model": MODEL_NAME, "prompt": ask.prompt, "max_tokens": ask.max_tokens,
            **ask.sampling, **ask.slo}  # fmt: skip
