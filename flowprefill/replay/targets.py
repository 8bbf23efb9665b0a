"""Targets: servers that a replay can be sent to, and the one by gRPC (see http_targets too)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from flowprefill.replay.errors import ReplayError, TargetError
from flowprefill.replay.plan import PlannedRequest
from flowprefill_client import AsyncClient, ServerError

SAMPLING = {"temperature": 0.0, "ignore_eos": True}
"""Greedy, and as many tokens as asked for."""

Message = TypeVar("Message")


@dataclass(frozen=True)
class Part:
    """What one message of a streamed answer holds."""

    num_tokens: int
    """New tokens."""
    num_input_tokens: int | None = None
    """Tokens of the prompt by the server's count; None if this message does not say."""
    total_tokens: int | None = None
    """Tokens of the whole answer by the server's count; None if this message does not say."""
    server_ttft_s: float | None = None
    """Arrival to first token by the server's clock; None if this message does not say."""


class Target(Protocol[Message]):
    """A server. Belongs to the event loop that runs when it is made."""

    async def check(self) -> None:
        """Raise ReplayError unless the model is there."""

    def prepare(self, planned: PlannedRequest, prompt: str) -> Message:
        """What can be made of a request before the clock runs."""

    def send(self, message: Message) -> AsyncIterator[Part]:
        """Send it; the answer as it comes. Raises TargetError if it fails or ends too early."""

    async def close(self) -> None:
        """Close connections."""


def objectives_ms(planned: PlannedRequest) -> dict[str, float]:
    """The objectives under the names by which servers take them."""
    goal = planned.objective
    return {"ttft_slo_ms": 1000 * goal.ttft_s, "tbt_slo_ms": 1000 * goal.tbt_s}


@dataclass(frozen=True)
class GrpcMessage:
    """A prompt and the arguments of AsyncClient.stream."""

    prompt: str
    arguments: dict[str, Any]


class GrpcTarget:
    """A Triton model over gRPC, through this project's client: a stream for each request."""

    def __init__(self, url: str, model: str) -> None:
        """url: host:port"""
        self._url = url
        self._model = model
        self._client = AsyncClient(url, model)

    async def check(self) -> None:
        server = tritonclient.grpc.aio.InferenceServerClient(self._url)
        try:
            is_ready = await server.is_model_ready(self._model)
        except InferenceServerException as error:
            raise ReplayError(f"{self._url}: {error.message()}") from error
        finally:
            await server.close()
        if not is_ready:
            raise ReplayError(f"{self._url}: model {self._model} is not ready")

    def prepare(self, planned: PlannedRequest, prompt: str) -> GrpcMessage:
        arguments = {
            "max_tokens": planned.output_tokens,
            "sampling": SAMPLING,
            "return_timing": True,
        }
        return GrpcMessage(prompt, {**arguments, **objectives_ms(planned)})

    async def send(self, message: GrpcMessage) -> AsyncIterator[Part]:
        try:
            async with self._client.stream(message.prompt, **message.arguments) as stream:
                async for delta in stream:
                    yield Part(delta.num_output_tokens)
        except ServerError as error:
            raise TargetError(error.status or "ERROR", str(error)) from error
        answer = stream.completion()
        timing = answer.timing or {}
        yield Part(0, answer.num_input_tokens, server_ttft_s=timing.get("ttft_s"))

    async def close(self) -> None:
        await self._client.close()
