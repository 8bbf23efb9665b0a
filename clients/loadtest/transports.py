"""Transports: one request out, the parts of its answer in, over gRPC or HTTP. Knows no locust.

Everything here runs in gevent's greenlets, one per user. gRPC waits in C, where gevent cannot
switch, so its own gevent support comes first: without it one user's wait would stop all others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import grpc.experimental.gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

grpc.experimental.gevent.init_gevent()  # before anything that uses gRPC

from traffic import Generation  # noqa: E402

from flowprefill_client import Client, ServerError  # noqa: E402

TIMEOUT_S = 120.0
"""Longest wait for an answer over gRPC, or for its next part over HTTP."""
SAMPLING = {"temperature": 0, "ignore_eos": True}
"""ignore_eos: the load does not depend on what the model happens to say."""


class Part(NamedTuple):
    """One message of a streamed answer."""

    num_tokens: int
    num_bytes: int
    """Of text."""


class Transport(Protocol):
    """A user's way to the server."""

    protocol: str
    """What statistics call it."""

    def parts(self, request: Generation) -> Iterator[Part]:
        """Send a request; yields its answer as it comes in. Raises ServerError if it fails.

        Closing the iterator early cancels the request.
        """

    def close(self) -> None:
        """Leave no connection of this user behind."""


def with_code(error: ServerError) -> ServerError:
    """The error with its code in its text, which is what locust shows."""
    text = str(error)
    if error.status is None or text.startswith(error.status):
        return error
    return ServerError(f"{error.status}: {text}", error.status)


def connect(host: str, model: str) -> Transport:
    """The transport that the address names; it connects at the first request.

    host: http://HOST:PORT or https://HOST:PORT for generate_stream, HOST:PORT or grpc://HOST:PORT
        for gRPC streams

    Raises ValueError as check_host does.
    """
    check_host(host)
    if host.startswith(("http://", "https://")):
        return HttpTransport(host, model)
    return GrpcTransport(host.removeprefix("grpc://").rstrip("/"), model)


def check_host(host: str) -> None:
    """Raises ValueError for a scheme that is not ours."""
    scheme, separator, _ = host.partition("://")
    if separator and scheme not in ("http", "https", "grpc"):
        raise ValueError(f"host {host!r}: the scheme must be http, https, grpc, or none for gRPC")


@functools.cache
def shared_client(url: str, model: str) -> Client:
    """One connection for all users of this process.

    Each gRPC channel that waits holds one of the ten threads of gevent's pool, so the users beyond
    the tenth would wait for a channel of their own until another's request has ended.
    """
    return Client(url, model)


class GrpcTransport:
    """ModelStreamInfer, a stream for each request."""

    protocol = "gRPC"

    def __init__(self, url: str, model: str) -> None:
        self._client = shared_client(url, model)

    def parts(self, request: Generation) -> Iterator[Part]:
        """As of Transport."""
        with self._client.stream(
            request.prompt,
            max_tokens=request.max_tokens,
            ttft_slo_ms=request.objective.ttft_ms,
            tbt_slo_ms=request.objective.tbt_ms,
            slo_class=request.slo_class,
            sampling=SAMPLING,
            timeout_s=TIMEOUT_S,
        ) as stream:
            for delta in stream:
                yield Part(delta.num_output_tokens, len(delta.text.encode()))

    def close(self) -> None:
        """Nothing: the connection is everybody's."""


class HttpTransport:
    """generate_stream: server-sent events, on a connection of the user's own."""

    protocol = "HTTP"

    def __init__(self, url: str, model: str) -> None:
        self._client = HTTPClient.from_url(url, network_timeout=TIMEOUT_S)
        self._path = f"/v2/models/{model}/generate_stream"

    def parts(self, request: Generation) -> Iterator[Part]:
        """As of Transport."""
        body = json.dumps(_http_body(request)).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.post(self._path, body, headers) as response:
                if response.status_code != 200:
                    raise _http_error(response.status_code, response.read())
                yield from _parse_events(iter(functools.partial(response.readline, b"\n"), b""))
        except (OSError, HTTPParseError) as error:
            raise ServerError(f"{type(error).__name__}: {error}", "UNAVAILABLE") from None

    def close(self) -> None:
        """Close the connection; a server that is asked to stop would wait for it."""
        self._client.close()


def _http_body(request: Generation) -> dict[str, object]:
    body: dict[str, object] = {
        "text_input": request.prompt,
        "stream": True,
        "return_finish_reason": True,
        "return_num_output_tokens": True,
        "error_code_in_message": True,
        "ttft_slo_ms": request.objective.ttft_ms,
        "tbt_slo_ms": request.objective.tbt_ms,
        "sampling_parameters": json.dumps({"max_tokens": request.max_tokens, **SAMPLING}),
    }
    if request.slo_class is not None:
        body["slo_class"] = request.slo_class
    return body


def _parse_events(lines: Iterator[bytes]) -> Iterator[Part]:
    """Server-sent events of one answer. Raises ServerError if one is an error or the last lacks."""
    finish_reason = "None"  # vllm_backend's word for "still running"
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ServerError.from_message(event["error"])
        finish_reason = event["finish_reason"]
        yield Part(event["num_output_tokens"], len(event["text_output"].encode()))
    if finish_reason == "None":
        raise ServerError("the server closed the stream before the answer was complete")


def _http_error(status: int, body: bytes) -> ServerError:
    """From the reply to a request that was refused before its stream began."""
    text = body.decode(errors="replace")
    try:
        return ServerError.from_message(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return ServerError(text, f"HTTP {status}")
