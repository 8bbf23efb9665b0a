"""Headers that stand for a field of the body, for clients that cannot add fields."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from flowprefill.openai.errors import ApiError
from flowprefill.openai.schemas import GenerationRequest

_NUMBERS = {"ttft_slo_ms": "x-ttft-slo-ms", "tbt_slo_ms": "x-tbt-slo-ms"}
_TEXTS = {"slo_class": "x-slo-class", "tenant": "x-tenant", "request_id": "x-request-id"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def scheduling(request: GenerationRequest, headers: Mapping[str, str]) -> dict[str, Any]:
    """Objectives, class and tenant of a request; a field of the body wins over its header.

    Raises ApiError naming the header.
    """
    values: dict[str, Any] = {}
    for name in ("ttft_slo_ms", "tbt_slo_ms", "slo_class", "tenant"):
        value = getattr(request, name)
        if value is None and name in _NUMBERS:
            value = _number(_NUMBERS[name], headers.get(_NUMBERS[name]))
        elif value is None:
            value = headers.get(_TEXTS[name])
        values[name] = value
    return values


def request_id(request: GenerationRequest, headers: Mapping[str, str]) -> str:
    """The client's own id, else a new one. Raises ApiError if no header could carry it."""
    header = _TEXTS["request_id"]
    value = headers.get(header) if request.request_id is None else request.request_id
    if value is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(value):
        field = header if request.request_id is None else "request_id"
        raise ApiError.invalid(field, value, "1 to 256 visible ASCII characters")
    return value


def _number(header: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ApiError.invalid(header, text, "a number of milliseconds") from None
