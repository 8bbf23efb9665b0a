"""ServerError: what went wrong on the way to an answer, in the server's words."""

from __future__ import annotations

import re

import grpc

_NAMED_CODE = re.compile(r"\[([A-Z_]+)\] ")
_TRITON_TEXTS = {
    "UNAVAILABLE": re.compile(
        r"no available versions|stopped accepting|[Ss]erver (is )?(not ready|stopping)"
        r"|is not (ready|healthy)"
    ),
    "NOT_FOUND": re.compile(r"unknown model|is not found"),
}
"""In a stream tritonserver says what is wrong without its code. A model without available versions
is one that unloads, of which it says that it is unknown, too: the first that is found holds."""


class ServerError(Exception):
    """The server refused or failed a request, or could not be reached in time."""

    def __init__(self, message: str, status: str | None = None) -> None:
        """`status` is the server's error code (INVALID_ARG, UNAVAILABLE, ...) or a gRPC status.

        None if the error came with a text only, and the text is none of tritonserver's known ones.
        """
        super().__init__(message)
        self.status = status

    @staticmethod
    def from_message(text: str) -> ServerError:
        """From the error message of a response, which may begin with its code: "[CODE] text"."""
        named = _NAMED_CODE.match(text)
        if named is None:
            found = (code for code, texts in _TRITON_TEXTS.items() if texts.search(text))
            return ServerError(text, next(found, None))
        return ServerError(text[named.end() :], named.group(1))

    @staticmethod
    def from_rpc(error: grpc.RpcError) -> ServerError:
        """From an error of the call itself: deadline, connection, cancellation by the server."""
        status = error.code().name
        return ServerError(f"{status}: {error.details()}", status)
