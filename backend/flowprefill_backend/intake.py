"""Intake: requests that execute() has copied are parsed on threads of their own, and submitted.

Two threads check and tokenise in the order of arrival, one of them the long requests alone: short
ones need not wait for those, nor they for a flood of short ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from flowprefill.config import EngineConfig
from flowprefill.errors import QueueTimeoutError, UnavailableError
from flowprefill.request import Request
from flowprefill.stats import EngineInfo
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.answer import Answer
from flowprefill_backend.live import LiveRequest
from flowprefill_backend.request import RawRequest, parse
from flowprefill_backend.timing import RequestTiming
from flowprefill_backend.unload_watch import UNLOADING_MESSAGE
from flowprefill_backend.workers import Worker

LONG_BYTES = 2**14
"""A request of more is long: it takes over 10 ms or so to parse."""
MAX_WAITING = 1_000
MAX_WAITING_BYTES = 2**26
"""Requests, and their bytes, that wait for one thread at most; more are UNAVAILABLE."""


class Engine(Protocol):
    """What is used of EngineClient."""

    def submit(self, request: Request) -> None: ...


class Intake:
    """Whatever fails here reaches the client through `fail`."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        info: EngineInfo,
        engine: Engine,
        fail: Callable[[LiveRequest, Exception], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """on_error: gets what not even `fail` could tell."""
        self._config = config
        self._tokenizer = tokenizer
        self._info = info
        self._engine = engine
        self._fail = fail
        self._is_closing = False
        bounds = (MAX_WAITING, MAX_WAITING_BYTES)
        self.short_parser = Worker("parser of short requests", on_error, *bounds)
        self.long_parser = Worker("parser of long requests", on_error, *bounds)

    def take(self, live: LiveRequest, raw: RawRequest) -> None:
        """Parse and submit a request in its turn. Raises QueueFullError."""
        parser = self.long_parser if raw.num_bytes > LONG_BYTES else self.short_parser
        parser.post(partial(self._parse_and_submit, live, raw), raw.num_bytes)

    def close(self, timeout_s: float) -> None:
        """What waits is failed; each thread gets so long to end."""
        self._is_closing = True
        for parser in (self.short_parser, self.long_parser):
            parser.close(timeout_s)

    def _parse_and_submit(self, live: LiveRequest, raw: RawRequest) -> None:
        """On a parser thread."""
        try:
            if self._is_closing:
                raise UnavailableError(UNLOADING_MESSAGE)
            if not live.is_over:
                self._check_wait(raw.arrival_s)
                live.submit(self._engine.submit, self._parse(live, raw))
        except Exception as error:  # whatever it is, this client must hear of it
            self._fail(live, error)

    def _check_wait(self, arrival_s: float) -> None:
        waited_ms = (time.monotonic() - arrival_s) * 1000
        limit_ms = self._config.queue_timeout_ms
        if waited_ms > limit_ms:
            raise QueueTimeoutError(
                f"the request waited {waited_ms:.0f} ms to be parsed > "
                f"queue_timeout_ms={limit_ms:g}"
            )

    def _parse(self, live: LiveRequest, raw: RawRequest) -> Request:
        parsed = parse(raw, self._config, self._info, self._tokenizer)
        live.answer = Answer(
            parsed.options,
            parsed.prompt,
            len(parsed.prompt_token_ids),
            parsed.sampling,
            self._tokenizer,
            RequestTiming(raw.arrival_s, parsed.slo),
        )
        return Request(
            req_id=live.req_id,
            prompt_token_ids=parsed.prompt_token_ids,
            sampling=parsed.sampling,
            slo=parsed.slo,
            arrival_s=raw.arrival_s,
            tenant=parsed.tenant,
        )
