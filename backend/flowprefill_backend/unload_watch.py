"""UnloadWatch: notices that the server unloads a model which still has requests.

The server unloads a model once the last of its responses is sent, and says nothing to it before. So
one thread asks for the model's state, once a second and only while requests live. It does so over
HTTP: pb_utils.is_model_ready of tritonserver 2.51 never returns while the server ends, and holds
the interpreter lock. Of a model that was replaced under its name, by a load of changed files, the
server says nothing: the name is in use. Such an instance finds that out by its claim.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from typing import Protocol

POLL_S = 1.0
UNLOADING_MESSAGE = "the model is unloading"
REPLACED_MESSAGE = "the model was loaded anew"
_ANSWER_S = 5.0


class InstanceLike(Protocol):
    """What is used of Instance."""

    @property
    def has_live(self) -> bool: ...

    @property
    def is_replaced(self) -> bool: ...

    def refuse_new(self, reason: str) -> None: ...

    def drain(self, timeout_s: float, reason: str) -> int: ...


class UnloadWatch:
    """Drains an instance within a limit once its model is being unloaded, or was loaded anew."""

    def __init__(
        self,
        instance: InstanceLike,
        is_unloading: Callable[[], bool],
        drain_s: float,
        on_cut_short: Callable[[str, int], None],
    ) -> None:
        """is_unloading: asks the server. drain_s: how long requests may still run. on_cut_short:
        gets why, and the number of those that were failed then."""
        self._instance = instance
        self._is_unloading = is_unloading
        self._drain_s = drain_s
        self._on_cut_short = on_cut_short
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unload-watch", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            if not self._instance.has_live:
                continue
            if self._instance.is_replaced:
                # Nothing is refused: the server may send some more before it turns to the new one.
                self._drain(REPLACED_MESSAGE)
            elif self._is_unloading():
                self._instance.refuse_new(UNLOADING_MESSAGE)
                self._drain(UNLOADING_MESSAGE)
                return

    def _drain(self, reason: str) -> None:
        num_cut_short = self._instance.drain(self._drain_s, reason)
        if num_cut_short:
            self._on_cut_short(reason, num_cut_short)


def ask_server(address: str, model: str, version: str) -> bool:
    """Whether the tritonserver at host:port `address` says that it unloads the model.

    False without an answer: a server that is busy or ends says nothing of the model.
    """
    try:
        connection = http.client.HTTPConnection(address, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v2/repository/index", "{}")
            index = json.loads(connection.getresponse().read())
        states = {(entry["name"], entry.get("version")): entry.get("state") for entry in index}
        return states.get((model, version)) == "UNLOADING"
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
        return False
