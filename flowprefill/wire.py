"""Messages between EngineClient and the engine process, and between ranks: msgpack over a socket.

Knows neither requests' meaning nor processes. A message is `[kind, body]`. msgpack values delimit
themselves, so the stream needs no frames around them: a reader takes what the socket holds, yields
the messages that are complete, and never waits in the middle of one.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import socket
import threading
from typing import Any

import msgpack

from flowprefill import errors

RECEIVE_BYTES = 1 << 18


class Kind(str, enum.Enum):
    """What a message is about; the comment gives its body."""

    # client to engine
    START = "start"  # {"config": EngineConfig.to_dict(), "engine_factory": "module:callable"}
    SUBMIT = "submit"  # Request.to_wire()
    CANCEL = "cancel"  # req_id
    PING = "ping"  # None
    CLOSE = "close"  # drain_s
    # engine to client
    PROGRESS = "progress"  # [stage, fraction]
    READY = "ready"  # EngineInfo.to_wire()
    LOAD_FAILED = "load_failed"  # pack_error()
    OUTPUT = "output"  # TokenOutput.to_wire()
    PONG = "pong"  # [Engine.num_slices, Engine.slice_s]
    # both ways
    STATS = "stats"  # [serial number, None] / [serial number, EngineStats.to_wire()]
    TIMELINE = "timeline"  # [number, goes_on] / [number, [[DeviceRun.to_wire(), ...], is_full]]
    # rank 0 to the ranks that follow it (parallel/); CLOSE ends them too, START and READY as above
    ALLOCATE = "allocate"  # KV blocks
    RUN = "run"  # [run id, pass id, parallel.messages of a new pass or None]
    LEFT = "left"  # [run id, boundary]
    FORGET_PASS = "forget_pass"  # pass id
    FORGET_TABLE = "forget_table"  # table id
    # a rank to rank 0
    LOADED = "loaded"  # KV blocks that it has room for
    FAILED = "failed"  # pack_error()


Message = tuple[Kind, Any]


def pack(kind: Kind, body: Any = None) -> bytes:
    """One message as bytes. Raises TypeError, ValueError or OverflowError if it cannot be."""
    # surrogatepass: error texts may hold file names that are not UTF-8
    packed = msgpack.packb([kind.value, body], unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def pack_error(error: errors.FlowPrefillError) -> list[str]:
    return [type(error).__name__, str(error)]


def unpack_error(body: list[str]) -> errors.FlowPrefillError:
    """The error of the other side: same type (the base for an unknown one), same message."""
    name, message = body
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.FlowPrefillError)):
        kind = errors.FlowPrefillError
    # not through __init__: some of our errors build their message from several arguments
    error = kind.__new__(kind, message)
    error.args = (message,)
    return error


class Channel:
    """One end of the socket. `send` never blocks: a thread of its own writes.

    So neither the engine thread nor the server waits for a slow or frozen peer, whatever the size
    of the socket's buffer; what piled up meanwhile (the tokens of one step) leaves in one write.
    One thread receives; any thread sends.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", strict_map_key=False)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._write, name="wire-sender", daemon=True)
        self._sender.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packed: bytes) -> None:
        """Queue a message made by `pack`. A peer that is gone shows only in `receive`."""
        self._outgoing.put(packed)

    def receive(self) -> list[Message]:
        """Wait for bytes, return the messages now complete, maybe none. EOFError at the end."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:  # reset: the peer died with our bytes unread
            raise EOFError from error
        if not data:
            raise EOFError
        self._unpacker.feed(data)
        return [(Kind(kind), body) for kind, body in self._unpacker]

    def flush(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for what is queued to leave; nothing can be sent afterwards."""
        self._outgoing.put(None)
        self._sender.join(timeout_s)

    def close(self) -> None:
        """Shut the socket without waiting for what is queued."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):  # the peer may have shut it before
            self._socket.shutdown(socket.SHUT_RDWR)  # frees a sender that is stuck in a write
        self._sender.join()
        self._socket.close()

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = [self._outgoing.get()]
            while not self._outgoing.empty():
                batch.append(self._outgoing.get())
            is_open = None not in batch
            try:
                self._socket.sendall(b"".join(data for data in batch if data is not None))
            except OSError:
                return  # the peer is gone, which the receiving side sees as its EOF
