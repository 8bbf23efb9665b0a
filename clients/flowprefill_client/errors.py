"""ServerError: what went wrong on the way to an answer, in the server's words."""

from __future__ import annotations

import re

import grpc

_NAMED_CODE = re.compile(r"\[([A-Z_]+)\] ")


class ServerError(Exception):
    """The server refused or failed a request, or could not be reached in time."""

    def __init__(self, message: str, status: str | None = None) -> None:
        """`status` is the server's error code (INVALID_ARG, UNAVAILABLE, ...) or a gRPC status.

        None if the error came with text only, as those of tritonserver itself do.
        """
        super().__init__(message)
        self.status = status

    @staticmethod
    def from_message(text: str) -> ServerError:
        """From the error message of a response, which may begin with its code: "[CODE] text"."""
        named = _NAMED_CODE.match(text)
        if named is None:
            return ServerError(text)
        return ServerError(text[named.end() :], named.group(1))

    @staticmethod
    def from_rpc(error: grpc.RpcError) -> ServerError:
        """From an error of the call itself: deadline, connection, cancellation by the server."""
        status = error.code().name
        return ServerError(f"{status}: {error.details()}", status)
