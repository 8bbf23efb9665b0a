"""Typed clients for a FlowPrefill model on tritonserver. Never imports torch."""

from flowprefill_client.aio import AsyncClient, AsyncStream
from flowprefill_client.answer import Completion, Delta, TokenLogprob
from flowprefill_client.client import Client, Stream
from flowprefill_client.errors import ServerError
from flowprefill_client.messages import Prompt

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "Prompt",
    "ServerError",
    "Stream",
    "TokenLogprob",
]
