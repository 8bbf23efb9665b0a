"""A peer that answers POSTs by server-sent events, over a real socket, as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Send = Callable[[object], None]
"""Sends one event: an object as JSON, or text as it is. Raises OSError if the client is gone."""


@dataclass
class Peer:
    """The server's address and what it was sent."""

    url: str
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of each POST."""
    was_asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first GET."""


@contextlib.contextmanager
def sse_server(
    answer: Callable[[dict[str, Any], Send], None],
    status: int = 200,
    is_ready: bool = True,
) -> Iterator[Peer]:
    """Answers every POST by `answer(body, send)`, on a thread each; GETs by `is_ready`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            peer.was_asked.set()
            self.send_response(200 if is_ready else 400)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            peer.requests.append((self.path, body))
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(OSError):
                answer(body, self.send)

        def send(self, event: object) -> None:
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            self.wfile.write(text.encode())
            self.wfile.flush()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that come at once; the default is 5
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    peer = Peer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def openai_answer(body: dict[str, Any], send: Send) -> None:
    """As many tokens as asked for, one event each; then usage, if it is asked for."""
    num_tokens = body["max_tokens"]
    for index in range(num_tokens):
        reason = "length" if index == num_tokens - 1 else None
        send({"choices": [{"index": 0, "text": f" w{index}", "finish_reason": reason}]})
    if body.get("stream_options", {}).get("include_usage"):
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": num_tokens}
        send({"choices": [], "usage": usage})
    send("data: [DONE]\n\n")
