"""ApiError: what went wrong, as an HTTP status and as OpenAI's error object."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from flowprefill.admission import QUEUE_FULL
from flowprefill.errors import shorten
from flowprefill.retry_after import read_retry_after_s
from flowprefill_client import ServerError

MIN_RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1_000

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
_STATUSES = {
    "INVALID_ARG": 400,
    "INVALID_ARGUMENT": 400,
    "UNSUPPORTED": 400,
    "UNIMPLEMENTED": 400,
    "NOT_FOUND": 404,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
}
"""TritonError codes and gRPC statuses; any other, or none, is 500. 499: somebody cancelled it by
its id."""
_PREFIX = "Error generating stream: "
_FIELD = re.compile(r"'?([A-Za-z_]\w*)((?:\[[^\]=]{0,80}\])?(?:\.\w+)?)'?=")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """param: the field at fault. retry_after_s: of 429 and 503; None = the least."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @staticmethod
    def invalid(field: str, value: object, limit: str) -> ApiError:
        """400 for a field of the request."""
        message = f"{field}={shorten(repr(value))}: must be {limit}"
        return ApiError(400, message, param=field, code="invalid_value")

    @staticmethod
    def unsupported(field: str, value: object) -> ApiError:
        """400 for a field of OpenAI's that nothing here stands for."""
        message = f"{field}={shorten(repr(value))} is not supported"
        return ApiError(400, message, param=field, code="unsupported")

    @staticmethod
    def unknown_model(model: str) -> ApiError:
        message = f"the model {shorten(repr(model))} does not exist"
        return ApiError(404, message, param="model", code="model_not_found")

    @staticmethod
    def from_server(error: ServerError, fields: Mapping[str, str]) -> ApiError:
        """From what the backend or tritonserver said. fields: its names of ours that differ."""
        text = str(error).removeprefix(_PREFIX)
        status = _status(error.status, text)
        field = _FIELD.match(text) if status == 400 else None
        param = None
        if field is not None:
            param = fields.get(field[1], field[1]) + field[2]
            text = f"{param}={text[field.end() :]}"
        code = {400: "invalid_value", 404: "model_not_found", 429: "queue_full"}.get(status)
        if error.status == "UNSUPPORTED":
            code = "unsupported"
        return ApiError(
            status, text, param=param, code=code, retry_after_s=read_retry_after_s(text)
        )

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After where a later try may succeed: whole seconds, at least 1."""
        if self.status not in (429, 503):
            return {}
        wait_s = max(MIN_RETRY_AFTER_S, math.ceil(self.retry_after_s or 0))
        return {"retry-after": str(wait_s)}

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": shorten(str(self), MAX_MESSAGE_CHARS),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def _status(code: str | None, text: str) -> int:
    if code == "UNAVAILABLE" and text.startswith(QUEUE_FULL):
        return 429
    return _STATUSES.get(code or "", 500)
