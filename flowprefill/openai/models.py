"""ModelDirectory: which models of tritonserver can be asked, known without asking at each request.

A model counts if it is decoupled and takes sampling_parameters: those of this backend, and of
vllm_backend; not a request/response model in front of one. Those of this backend also say what
their engine is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from flowprefill.openai.errors import ApiError
from flowprefill_client import AsyncClient, ServerError
from flowprefill_client.messages import CHANNEL_OPTIONS, OWN_CONNECTION

REFRESH_S = 1.0
"""How soon a loaded or unloaded model is noticed, and a server that came or went."""
_OWN_INPUT = "return_timing"
"""Only models of this backend have it. Another one would take a question for a prompt."""
_FAILED = "failed"

_log = logging.getLogger("flowprefill.openai")


class ModelDirectory:
    """The models, and a client for each. Belongs to one event loop."""

    def __init__(
        self,
        grpc_url: str,
        engines_s: float | None,
        silence_s: float,
        on_silence: Callable[[], bool],
    ) -> None:
        """grpc_url: host:port of tritonserver's gRPC endpoint
        engines_s: between two questions for the state of an engine; None: no questions
        on_silence: called when nothing was answered for `silence_s`; if it returns True,
        connections are new then"""
        self._grpc_url = grpc_url
        self._engines_s = engines_s
        self._silence_s = silence_s
        self._call_timeout_s = silence_s / 3
        self._on_silence = on_silence
        self._silent_since_s: float | None = None
        self._connect()
        # Kept when a model unloads: answers that are under way still come through its client.
        self._clients: dict[str, AsyncClient] = {}
        self._since_s: dict[str, int] = {}  # of those that are ready
        self._others: set[str] = set()  # ready, but cannot be asked
        self._own: set[str] = set()  # whose engine has a state
        self._failed: set[str] = set()  # whose engine failed for good
        self._questions: set[asyncio.Task[None]] = set()
        self._is_live = False

    @property
    def is_ready(self) -> bool:
        """tritonserver answers, and there is a model whose engine has not failed for good."""
        return self._is_live and bool(self._since_s.keys() - self._failed)

    def names(self) -> list[str]:
        return sorted(self._since_s)

    def since_s(self, name: str) -> int:
        """Unix time at which the model was first seen."""
        return self._since_s[name]

    async def client(self, name: str) -> AsyncClient:
        """Raises ApiError: 404 for an unknown model, 503 if tritonserver does not answer."""
        if name not in self._since_s and name not in self._others:
            await self.refresh()  # it may have been loaded a moment ago
        if name in self._since_s:
            return self._clients[name]
        if not self._is_live:
            raise ApiError(503, "the server is not ready", code="unavailable")
        raise ApiError.unknown_model(name)

    async def refresh(self) -> None:
        """Ask tritonserver; it answers without its models."""
        begin_s = time.monotonic()
        try:
            live = await self._ask("ServerLive", service_pb2.ServerLiveRequest())
            query = service_pb2.RepositoryIndexRequest(ready=True)
            index = await self._ask("RepositoryIndex", query)
            names = {model.name for model in index.models}
            for name in sorted(names - self._since_s.keys() - self._others):
                await self._add(name)
        except grpc.RpcError as error:
            self._is_live = False
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                await self._note_silence(begin_s)
            else:  # the host is there: a server that stops refuses questions and goes on answering
                self._silent_since_s = None
            return
        self._silent_since_s = None
        for name in self._since_s.keys() - names:
            del self._since_s[name]
        for noted in (self._others, self._own, self._failed):
            noted.intersection_update(names)
        self._is_live = live.live

    async def ask_engines(self) -> None:
        """Ask each model of this backend for its engine's state."""
        self._questions = {asyncio.create_task(self._ask_engine(name)) for name in self._own}
        if self._questions:
            await asyncio.wait(self._questions)

    async def follow(self) -> None:
        """Stay up to date until cancelled."""
        loops = [_repeat(self.refresh, REFRESH_S)]
        if self._engines_s is not None:
            loops.append(_repeat(self.ask_engines, self._engines_s))
        await asyncio.gather(*loops)

    async def close(self) -> None:
        # A question that is dropped just before its end would hold the model in tritonserver.
        if self._questions:
            await asyncio.wait(self._questions, timeout=self._call_timeout_s)
        for client in self._clients.values():
            await client.close()
        await self._channel.close()

    def _connect(self) -> None:
        """Connections are made by the first calls."""
        options = [*CHANNEL_OPTIONS, *OWN_CONNECTION]
        self._channel = grpc.aio.insecure_channel(self._grpc_url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def _note_silence(self, begin_s: float) -> None:
        """A question that was asked at `begin_s` was not answered."""
        if self._silent_since_s is None:
            self._silent_since_s = begin_s
        if time.monotonic() - self._silent_since_s < self._silence_s:
            return
        self._silent_since_s = None  # the next time after as long again
        if not self._on_silence():
            return
        # The old connections may lead to a host that is no more. Without keep-alive, which
        # tritonserver allows every five minutes only, they would for a quarter of an hour.
        channel, clients = self._channel, self._clients
        self._connect()
        self._clients = {name: self._make_client(name) for name in clients}
        for client in clients.values():
            await client.close()
        await channel.close(self._call_timeout_s)  # somebody's question may be under way

    def _make_client(self, name: str) -> AsyncClient:
        return AsyncClient(self._grpc_url, name, own_connection=True)

    async def _add(self, name: str) -> None:
        query = service_pb2.ModelConfigRequest(name=name)
        with contextlib.suppress(grpc.RpcError):  # unloaded in between
            config = (await self._ask("ModelConfig", query)).config
            inputs = {tensor.name for tensor in config.input}
            if config.model_transaction_policy.decoupled and "sampling_parameters" in inputs:
                if name not in self._clients:
                    self._clients[name] = self._make_client(name)
                self._since_s[name] = int(time.time())
                if _OWN_INPUT in inputs:
                    self._own.add(name)
            else:
                self._others.add(name)

    async def _ask_engine(self, name: str) -> None:
        with contextlib.suppress(ServerError):  # what is not known is no failure
            state = await self._clients[name].engine_state()
            if state == _FAILED and name in self._own:
                self._failed.add(name)
            else:
                self._failed.discard(name)

    async def _ask(self, method: str, query: Any) -> Any:
        return await getattr(self._stub, method)(query, timeout=self._call_timeout_s)


async def _repeat(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
    while True:
        try:
            await work()
        except Exception:  # a bug of ours must not make what is known old
            _log.exception("the models cannot be followed")
        await asyncio.sleep(pause_s)
