"""Requests to the OpenAI-compatible endpoint, without a client that hides statuses and bytes."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPResponse
from typing import Any


def post(
    port: int, path: str, body: dict[str, Any] | bytes, **headers: str
) -> tuple[HTTPResponse, Any]:
    """The response and its JSON, or its text if it is a stream."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", f"/v1/{path}", data, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = response.getheader("content-type") == "application/json"
    return response, json.loads(text) if is_json else text


def events(text: str) -> list[dict[str, Any]]:
    """The JSON documents of a stream, up to its [DONE], which must be there."""
    *lines, done = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert done == "data: [DONE]", done
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def send_raw(port: int, body: dict[str, Any]) -> socket.socket:
    """An open connection on which a completion was asked for."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection
