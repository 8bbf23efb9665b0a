"""The asyncio client: the same calls as client.py, awaited; timelines are for the other one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from flowprefill_client.answer import Completion, Delta, Exchange
from flowprefill_client.errors import ServerError
from flowprefill_client.messages import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    OWN_CONNECTION,
    Prompt,
    cancel_request,
    generate_request,
    parse_control_response,
    state_request,
    stats_request,
)


class AsyncStream(Exchange):
    """One answer in the making: an async iterator of Delta.

    As an async context manager it cancels the request when the block is left before the answer is
    complete. Cancelling the task that iterates cancels the request too.
    """

    def __init__(self, call: Any, request_id: str) -> None:
        super().__init__(call, request_id)
        self._messages = call.__aiter__()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next part. Ends quietly after cancel(); raises ServerError if the server failed."""
        try:
            message = await self._messages.__anext__()
        except StopAsyncIteration:
            self._recorder.check_complete()
            raise
        except asyncio.CancelledError:
            # grpc.aio raises this for our own cancel() as well as for the task's.
            if self._is_cancelled:
                raise StopAsyncIteration from None
            raise
        except grpc.RpcError as error:
            raise ServerError.from_rpc(error) from None
        try:
            return self._recorder.add(message)
        except ServerError:
            # As in Stream.__next__: cancelling now would hold the model in tritonserver.
            self._is_over = True
            with contextlib.suppress(grpc.RpcError):
                async for _ in self._messages:
                    pass
            raise

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


class AsyncClient:
    """Talks to one FlowPrefill model over gRPC; one stream per request on one shared connection.

    Belongs to the event loop that runs when it is made.
    """

    def __init__(
        self, url: str = "localhost:8001", model: str = "smollm2", *, own_connection: bool = False
    ) -> None:
        """`url` is host:port of tritonserver's gRPC endpoint. Connects at the first request.

        Clients of one process share a connection, but for those with `own_connection`: what hangs
        with one ends when its client is closed.
        """
        asyncio.get_running_loop()  # raises here rather than at a later, stranger place
        self._model = model
        options = [*CHANNEL_OPTIONS, *OWN_CONNECTION] if own_connection else CHANNEL_OPTIONS
        self._channel = grpc.aio.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 16,
        ttft_slo_ms: float | None = None,
        tbt_slo_ms: float | None = None,
        slo_class: str | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        return_timing: bool = False,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Send `prompt`; returns at once. Arguments as of Client.stream."""
        request_id = request_id or str(uuid.uuid4())
        values = {"max_tokens": max_tokens, **(sampling or {})}
        parameters = {
            "ttft_slo_ms": ttft_slo_ms,
            "tbt_slo_ms": tbt_slo_ms,
            "slo_class": slo_class,
            "tenant": tenant,
            "return_timing": return_timing or None,
        }
        request = generate_request(self._model, prompt, request_id, values, parameters)
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)
        return AsyncStream(call, request_id)

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 16,
        ttft_slo_ms: float | None = None,
        tbt_slo_ms: float | None = None,
        slo_class: str | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        return_timing: bool = False,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Send `prompt` and wait for the whole answer; arguments as of Client.stream."""
        async with self.stream(
            prompt,
            max_tokens=max_tokens,
            ttft_slo_ms=ttft_slo_ms,
            tbt_slo_ms=tbt_slo_ms,
            slo_class=slo_class,
            tenant=tenant,
            request_id=request_id,
            return_timing=return_timing,
            sampling=sampling,
            timeout_s=timeout_s,
        ) as stream:
            async for _ in stream:
                pass
        return stream.completion()

    async def cancel(self, request_id: str) -> bool:
        """Cancel the latest live request with this id, whoever sent it. False if there is none."""
        return await self._control(cancel_request(self._model, request_id)) == "cancelled"

    async def engine_stats(self) -> dict[str, Any]:
        """Gauges and counters of the model's engine: the fields of EngineStats."""
        stats: dict[str, Any] = json.loads(await self._control(stats_request(self._model)))
        return stats

    async def engine_state(self) -> str:
        """starting, ready, restarting, failed (for good) or closed. Answered at once."""
        return await self._control(state_request(self._model))

    async def close(self) -> None:
        """Cancel what still runs and close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _control(self, request: Any) -> str:
        call = self._stub.ModelStreamInfer(iter([request]), timeout=CONTROL_TIMEOUT_S)
        try:
            return parse_control_response([message async for message in call])
        except grpc.RpcError as error:
            raise ServerError.from_rpc(error) from None
