"""The application: routes, and the way of a request through them.

body -> schema -> Generations -> one gRPC stream each -> Answers -> Reply, whole or as events
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from flowprefill.openai import body, headers, streaming
from flowprefill.openai.answers import Answers
from flowprefill.openai.disconnect import ClientLeftError, while_connected
from flowprefill.openai.errors import ApiError
from flowprefill.openai.models import ModelDirectory
from flowprefill.openai.replies import ChatReply, CompletionReply, Reply
from flowprefill.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from flowprefill.openai.translate import (
    COMPLETION_FIELDS,
    Generation,
    chat_fields,
    chat_generations,
    completion_generations,
)
from flowprefill_client import AsyncClient, ServerError

STOPPING = "the server is stopping"
SILENT = "the model server does not answer any more"
FIRST_EVENT_WAIT_S = 1.0
"""How long a stream's headers are held back: an error within it still becomes a status."""


@dataclass(frozen=True)
class Settings:
    """Where the model server is, and how streams are kept alive."""

    grpc_url: str
    """host:port of tritonserver's gRPC endpoint"""
    keep_alive_s: float = 2.0
    """Silence of a stream after which a comment is sent; some proxies cut it after 5 s."""
    exit_timeout_s: float = 10.0
    """How long running answers may take once this server is draining."""
    engines_s: float | None = 5.0
    """How soon an engine that failed for good is noticed; tritonserver counts each question as a
    request of the model. None: not at all, where the launcher notices it."""
    silence_s: float = 15.0
    """After so long without a word of the model server running answers are given up: a host that
    vanished closes no connection."""


class Endpoint:
    """What the routes share. Made before there is an event loop, opened in it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: weakref.WeakSet[Answers] = weakref.WeakSet()

    @contextlib.asynccontextmanager
    async def open(self, app: FastAPI) -> AsyncIterator[None]:
        """The lifespan of the application."""
        self.models = ModelDirectory(
            self.settings.grpc_url,
            self.settings.engines_s,
            self.settings.silence_s,
            on_silence=self._on_silence,
        )
        await self.models.refresh()
        following = asyncio.create_task(self.models.follow())
        yield
        following.cancel()
        await self.models.close()

    @property
    def num_live(self) -> int:
        """Answers that are under way."""
        return len(self._tasks)

    def _on_silence(self) -> bool:
        """Whether running answers were given up; in a drain they have until the exit timeout."""
        if not self.is_draining:
            self.end_answers(SILENT)
        return not self.is_draining

    def end_answers(self, why: str = STOPPING) -> None:
        """Fail all that have not ended: their clients are told so."""
        for answers in list(self._answers):
            answers.fail(ServerError(why, "UNAVAILABLE"))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        parsed, generations = await self._read(request, CompletionRequest, completion_generations)
        reply_id = f"cmpl-{headers.request_id(parsed, request.headers)}"
        reply = CompletionReply(reply_id, parsed.model, len(generations))
        return await self._answer(request, parsed, generations, reply, COMPLETION_FIELDS)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        parsed, generations = await self._read(request, ChatRequest, chat_generations)
        reply_id = f"chatcmpl-{headers.request_id(parsed, request.headers)}"
        reply = ChatReply(reply_id, parsed.model, len(generations), parsed.top_logprobs or 0)
        return await self._answer(request, parsed, generations, reply, chat_fields(parsed))

    async def list_models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self._card(name) for name in self.models.names()]}

    async def get_model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME."""
        if name not in self.models.names():
            raise ApiError.unknown_model(name)
        return self._card(name)

    async def health(self) -> Response:
        """GET /health: from what is known, so it waits for nobody."""
        is_ready = self.models.is_ready and not self.is_draining
        return Response(status_code=200 if is_ready else 503)

    async def _read(
        self,
        request: Request,
        schema: type[body.RequestT],
        translate: Callable[[body.RequestT], list[Generation]],
    ) -> tuple[body.RequestT, list[Generation]]:
        self._refuse_if_draining()
        return await body.parse_body(await body.read_body(request), schema, translate)

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            wait_s = self.settings.exit_timeout_s
            raise ApiError(503, STOPPING, code="unavailable", retry_after_s=wait_s)

    async def _answer(
        self,
        request: Request,
        parsed: GenerationRequest,
        generations: list[Generation],
        reply: Reply,
        fields: Mapping[str, str],
    ) -> Response:
        scheduling = headers.scheduling(parsed, request.headers)
        client = await self.models.client(parsed.model)
        self._refuse_if_draining()  # the body may have taken long; nothing waits from here on
        answers = self._send(client, generations, reply.reply_id, scheduling)
        id_header = {"x-request-id": reply.reply_id.split("-", 1)[1]}
        try:
            if parsed.stream:
                await _begin(request, answers)
                content = self._events(answers, parsed, reply, fields)
                return streaming.EventStream(answers, content, id_header)
            async with answers:
                await while_connected(request, answers.read_all())
        except ServerError as error:
            raise ApiError.from_server(error, fields) from None
        whole = reply.whole(answers.completions(), parsed.n or 1)
        return JSONResponse(whole, headers=id_header)

    def _events(
        self,
        answers: Answers,
        parsed: GenerationRequest,
        reply: Reply,
        fields: Mapping[str, str],
    ) -> AsyncIterator[bytes]:
        options = parsed.stream_options
        return streaming.events(
            answers,
            reply,
            parsed.n or 1,
            include_usage=bool(options and options.include_usage),
            keep_alive_s=self.settings.keep_alive_s,
            api_error=lambda error: ApiError.from_server(error, fields),
        )

    def _send(
        self,
        client: AsyncClient,
        generations: list[Generation],
        reply_id: str,
        scheduling: dict[str, Any],
    ) -> Answers:
        is_single = len(generations) == 1
        streams = [
            client.stream(
                generation.prompt,
                max_tokens=generation.max_tokens,
                sampling=generation.sampling,
                request_id=reply_id if is_single else f"{reply_id}-{index}",
                return_timing=True,
                **scheduling,
            )
            for index, generation in enumerate(generations)
        ]
        answers = Answers(streams, self._tasks)
        self._answers.add(answers)
        return answers

    def _card(self, name: str) -> dict[str, Any]:
        created = self.models.since_s(name)
        return {"id": name, "object": "model", "created": created, "owned_by": "flowprefill"}


def create_app(endpoint: Endpoint) -> FastAPI:
    """The routes of `endpoint`, errors in OpenAI's form."""
    app = FastAPI(title="FlowPrefill", docs_url=None, redoc_url=None, lifespan=endpoint.open)
    app.post("/v1/completions", response_model=None)(endpoint.complete)
    app.post("/v1/chat/completions", response_model=None)(endpoint.chat)
    app.get("/v1/models", response_model=None)(endpoint.list_models)
    app.get("/v1/models/{name:path}", response_model=None)(endpoint.get_model)
    app.get("/health", response_model=None)(endpoint.health)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientLeftError, _answer_nobody)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)  # with its body half sent
    app.add_exception_handler(Exception, _answer_bug)
    return app


async def _begin(request: Request, answers: Answers) -> None:
    """Wait for the first part of a stream, not long. Raises ServerError if it is a failure."""
    try:
        await while_connected(request, answers.wait(FIRST_EVENT_WAIT_S))
        answers.raise_failure()
    except BaseException:
        answers.cancel()
        raise


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Of the framework: no such path or method."""
    assert isinstance(error, HTTPException)
    shown = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(shown.body, shown.status, headers=error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """Of ours; the framework logs it."""
    shown = ApiError(500, f"unexpected {type(error).__name__}: {error}")
    return JSONResponse(shown.body, shown.status)
