"""ModelDirectory: which models of tritonserver can be asked, known without asking at each request.

A model counts if it is decoupled and takes sampling_parameters: those of this backend, and of
vllm_backend; not a request/response model in front of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from flowprefill.openai.errors import ApiError
from flowprefill_client import AsyncClient
from flowprefill_client.messages import CHANNEL_OPTIONS

REFRESH_S = 1.0
"""How soon a loaded or unloaded model is noticed, and a server that came or went."""
_CALL_TIMEOUT_S = 5.0


class ModelDirectory:
    """The models, and a client for each. Belongs to one event loop."""

    def __init__(self, grpc_url: str) -> None:
        """grpc_url: host:port of tritonserver's gRPC endpoint"""
        self._grpc_url = grpc_url
        self._channel = grpc.aio.insecure_channel(grpc_url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # Kept when a model unloads: answers that are under way still come through its client.
        self._clients: dict[str, AsyncClient] = {}
        self._since_s: dict[str, int] = {}  # of those that are ready
        self._others: set[str] = set()  # ready, but not ours
        self._is_live = False

    @property
    def is_ready(self) -> bool:
        """tritonserver answers, and there is a model to ask."""
        return self._is_live and bool(self._since_s)

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
        try:
            live = await self._ask("ServerLive", service_pb2.ServerLiveRequest())
            query = service_pb2.RepositoryIndexRequest(ready=True)
            index = await self._ask("RepositoryIndex", query)
            names = {model.name for model in index.models}
            for name in sorted(names - self._since_s.keys() - self._others):
                await self._add(name)
        except grpc.RpcError:
            self._is_live = False
            return
        for name in self._since_s.keys() - names:
            del self._since_s[name]
        self._others &= names
        self._is_live = live.live

    async def follow(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        await self._channel.close()

    async def _add(self, name: str) -> None:
        query = service_pb2.ModelConfigRequest(name=name)
        with contextlib.suppress(grpc.RpcError):  # unloaded in between
            config = (await self._ask("ModelConfig", query)).config
            inputs = {tensor.name for tensor in config.input}
            if config.model_transaction_policy.decoupled and "sampling_parameters" in inputs:
                if name not in self._clients:
                    self._clients[name] = AsyncClient(self._grpc_url, name)
                self._since_s[name] = int(time.time())
            else:
                self._others.add(name)

    async def _ask(self, method: str, query: Any) -> Any:
        return await getattr(self._stub, method)(query, timeout=_CALL_TIMEOUT_S)
