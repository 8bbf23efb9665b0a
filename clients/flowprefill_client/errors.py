"""ServerError: what went wrong on the way to an answer, in the server's words."""

from __future__ import annotations

import grpc


class ServerError(Exception):
    """The server refused or failed a request, or could not be reached in time."""

    def __init__(self, message: str, status: str | None = None) -> None:
        """`status` is a gRPC status name (UNAVAILABLE, DEADLINE_EXCEEDED, ...).

        It is None for an error that came as a message of the stream: those carry text only.
        """
        super().__init__(message)
        self.status = status

    @staticmethod
    def from_rpc(error: grpc.RpcError) -> ServerError:
        """From an error of the call itself: deadline, connection, cancellation by the server."""
        status = error.code().name
        return ServerError(f"{status}: {error.details()}", status)
