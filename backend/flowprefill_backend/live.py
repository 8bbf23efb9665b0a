"""Requests that still owe their client an end: FINAL exactly once, and no question after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from flowprefill.errors import UnavailableError
from flowprefill.request import Request
from flowprefill_backend.answer import Answer
from flowprefill_backend.response import FINAL


class LiveRequest:
    """One request from execute() to FINAL.

    `send` and `close` are called on the request's own sender lane only, so responses keep their
    order. The lock is for what other threads do: ask whether the client has gone, submit, cancel.
    """

    def __init__(self, req_id: int, sender: Any) -> None:
        self.req_id = req_id
        self.triton_id = ""
        """The client's own id."""
        self.answer: Answer | None = None
        """Set before the request is submitted, None while it is being parsed."""
        self.names_error_code = False
        self.is_counted = False
        """It was begun in RequestCounts; control requests never are."""
        self._sender = sender
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_cancelled = False

    @property
    def is_over(self) -> bool:
        """Whether no more may be asked of or done for the client, but for the FINAL of a cancel."""
        return self._is_closed or self._is_cancelled

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def is_client_gone(self) -> bool:
        """Ask the server; costs one round trip to its process."""
        # The server frees what is asked about with FINAL, so `close` must wait for this call.
        with self._lock:
            return not self.is_over and bool(self._sender.is_cancelled())

    def submit(self, submit: Callable[[Request], None], request: Request) -> None:
        """Hand `request` to the engine's `submit`, unless the client left during parsing.

        After `cancel` the engine either has the request already or never gets it.
        """
        with self._lock:
            if not self.is_over:
                submit(request)

    def cancel(self) -> bool:
        """Mark as cancelled. Returns True only for the first call on a request that still runs."""
        with self._lock:
            if self.is_over:
                return False
            self._is_cancelled = True
            return True

    def send(self, response: Any) -> None:
        """Send one response that is not the last."""
        self._sender.send(response)

    def close(self, response: Any) -> bool:
        """Send the last response. Returns False, and sends nothing, if that was done before.

        Raises what the server says if it does not take the response; the client then gets FINAL
        alone, if that can be sent.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
        try:
            self._sender.send(response, flags=FINAL)
        except Exception:
            with contextlib.suppress(Exception):  # the first error says more
                self._sender.send(flags=FINAL)
            raise
        return True


class LiveRequests:
    """All live requests, by internal id and by the client's own id, which need not be unique."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._why_refused: str | None = None
        self._by_req_id: dict[int, LiveRequest] = {}
        self._by_triton_id: dict[str, dict[int, LiveRequest]] = {}

    def add(self, live: LiveRequest) -> None:
        """Raises UnavailableError after `refuse_new`."""
        with self._lock:
            if self._why_refused is not None:
                raise UnavailableError(self._why_refused)
            self._by_req_id[live.req_id] = live
            self._by_triton_id.setdefault(live.triton_id, {})[live.req_id] = live

    def discard(self, live: LiveRequest) -> None:
        with self._lock:
            if self._by_req_id.pop(live.req_id, None) is None:
                return
            namesakes = self._by_triton_id[live.triton_id]
            del namesakes[live.req_id]
            if not namesakes:
                del self._by_triton_id[live.triton_id]
            if not self._by_req_id:
                self._lock.notify_all()

    def refuse_new(self, reason: str) -> None:
        """Add no more. The first reason stays."""
        with self._lock:
            self._why_refused = self._why_refused or reason

    def wait_empty(self, timeout_s: float) -> None:
        """Until none is left, `timeout_s` at most."""
        with self._lock:
            self._lock.wait_for(lambda: not self._by_req_id, timeout_s)

    def get(self, req_id: int) -> LiveRequest | None:
        with self._lock:
            return self._by_req_id.get(req_id)

    def latest(self, triton_id: str) -> LiveRequest | None:
        """The most recent live request that its client called `triton_id`."""
        with self._lock:
            namesakes = self._by_triton_id.get(triton_id)
            return namesakes[max(namesakes)] if namesakes else None

    def all(self) -> list[LiveRequest]:
        with self._lock:
            return list(self._by_req_id.values())
