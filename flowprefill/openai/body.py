"""Reads the body of a request: bounded, and parsed aside when it is large."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from flowprefill.errors import shorten
from flowprefill.openai.errors import ApiError
from flowprefill.openai.schemas import GenerationRequest
from flowprefill.openai.translate import Generation, unknown_fields

MAX_BODY_BYTES = 8 * 2**20
"""Over a million token ids. Parsing so many holds others up for a tenth of a second or two, so much
text for hundredths."""
_MAX_DISCARDED_BYTES = 2**28
"""What is over the limit is read up to here: clients look for an answer once they have sent all."""
_LARGE_BYTES = 2**16
"""A larger body takes milliseconds to parse: on a thread, so that others do not wait for it."""
_MAX_NAMES = 100

_log = logging.getLogger("flowprefill.openai")
_warned: set[str] = set()

RequestT = TypeVar("RequestT", bound=GenerationRequest)


async def read_body(request: Request) -> bytes:
    """All of it. Raises ApiError 413 for more than MAX_BODY_BYTES."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > _MAX_DISCARDED_BYTES:
        raise _too_large(int(announced))
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > _MAX_DISCARDED_BYTES:
            break
        if num_bytes > MAX_BODY_BYTES:
            chunks.clear()
        else:
            chunks.append(chunk)
    if num_bytes > MAX_BODY_BYTES:
        raise _too_large(num_bytes)
    return b"".join(chunks)


async def parse_body(
    body: bytes, schema: type[RequestT], translate: Callable[[RequestT], list[Generation]]
) -> tuple[RequestT, list[Generation]]:
    """The request and what it asks of the model. Raises ApiError 400 naming the field."""
    if len(body) <= _LARGE_BYTES:
        return _parse(body, schema, translate)
    return await asyncio.to_thread(_parse, body, schema, translate)


def _parse(
    body: bytes, schema: type[RequestT], translate: Callable[[RequestT], list[Generation]]
) -> tuple[RequestT, list[Generation]]:
    try:
        parsed = schema.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from None
    for name in unknown_fields(parsed):
        _warn(name)
    return parsed, translate(parsed)


def _api_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    if not first["loc"]:
        return ApiError(400, f"the body: {first['msg']}", code="invalid_value")
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=field, code="invalid_value")
    message = f"{field}={shorten(repr(first['input']))}: {first['msg']}"
    return ApiError(400, message, param=str(first["loc"][0]), code="invalid_value")


def _too_large(num_bytes: int) -> ApiError:
    message = f"the body has {num_bytes} bytes or more; must be at most {MAX_BODY_BYTES}"
    return ApiError(413, message, code="body_too_large")


def _warn(name: str) -> None:
    """Once for each name, of which clients can make up any number."""
    if name not in _warned and len(_warned) < _MAX_NAMES:
        _warned.add(name)
        _log.warning("the field %s is unknown and ignored", shorten(repr(name)))
