"""Server-sent events: an answer in chunks, comments while nothing comes, and what ends it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from flowprefill.openai.answers import Answers
from flowprefill.openai.errors import ApiError
from flowprefill.openai.replies import Reply
from flowprefill_client import ServerError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends the answers as they come; cancels them when the client has left."""

    media_type = "text/event-stream"

    def __init__(
        self, answers: Answers, content: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        # A proxy that collects what it passes on would turn a stream into one late answer.
        hints = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(content, headers={**hints, **headers})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not left to the generator: a write that waits for the client would hold its end back.
        async with self._answers:
            await super().__call__(scope, receive, send)


async def events(
    answers: Answers,
    reply: Reply,
    n: int,
    *,
    include_usage: bool,
    keep_alive_s: float,
    api_error: Callable[[ServerError], ApiError],
) -> AsyncIterator[bytes]:
    """The events of a stream. After an error there is no [DONE]: it says that all was sent."""
    sent_s = time.monotonic()
    while not answers.is_complete:
        # Parts without text are not sent: silence is counted from what was.
        if not await answers.wait(max(0.0, sent_s + keep_alive_s - time.monotonic())):
            yield KEEP_ALIVE
            sent_s = time.monotonic()
            continue
        try:
            part = answers.take()
        except ServerError as error:
            yield event(api_error(error).body)
            return
        chunk = reply.chunk(part.index, part.delta)
        if chunk is not None:
            yield event(chunk | {"usage": None} if include_usage else chunk)
            sent_s = time.monotonic()
    if include_usage:
        yield event(reply.usage_chunk(answers.completions(), n))
    yield DONE


def event(document: dict[str, Any]) -> bytes:
    """One event. JSON holds no line break, which would end it."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")
