"""OpenVINO GenAI's continuous batching behind OpenAI's /v1/completions: as little as it takes.

Runs in a peer's interpreter: python -I openvino_server.py SETTINGS. Imports nothing of ours. The
pipeline runs in a process of its own, as a step holds Python's lock: in one process nobody would
hear a request that comes during a step.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Token:
    """One token of an answer."""

    text: str
    num_prompt_tokens: int
    is_last: bool


Submit = Callable[[str, int], Iterator[Token]]
"""Of a prompt and max_tokens: exactly so many tokens, as they come."""


class CompletionsServer(ThreadingHTTPServer):
    """Streams answers to POSTs, a thread for each; any GET is answered with the version."""

    request_queue_size = 512  # connections that come at once
    daemon_threads = True

    def __init__(self, port: int, submit: Submit, version: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.submit = submit
        self.version = version


class _Handler(BaseHTTPRequestHandler):
    server: CompletionsServer

    def do_GET(self) -> None:
        self._start("application/json")
        self.wfile.write(json.dumps({"version": self.server.version}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._start("text/event-stream")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            tokens = []
            for token in self.server.submit(body["prompt"], body["max_tokens"]):
                tokens.append(token)
                reason = "length" if token.is_last else None
                choice = {"index": 0, "text": token.text, "finish_reason": reason}
                self._send(json.dumps({"choices": [choice]}))
            usage = {
                "prompt_tokens": tokens[-1].num_prompt_tokens,
                "completion_tokens": len(tokens),
            }
            self._send(json.dumps({"choices": [], "usage": usage}))
            self._send("[DONE]")

    def _start(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()

    def _send(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        """Not a line for each request."""


class PipelineProcess:
    """The pipeline, in a process of its own that ends with this one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start it and wait until the model is loaded. Raises EOFError if it cannot be."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=run_pipeline, args=(theirs, settings), daemon=True).start()
        theirs.close()
        self.version: str = self._connection.recv()
        self._req_ids = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Token]] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, prompt: str, max_tokens: int) -> Iterator[Token]:
        """As Submit."""
        tokens: queue.SimpleQueue[Token] = queue.SimpleQueue()
        with self._lock:
            req_id = next(self._req_ids)
            self._answers[req_id] = tokens
            self._connection.send((req_id, prompt, max_tokens))
        is_last = False
        while not is_last:
            token = tokens.get()
            is_last = token.is_last
            yield token

    def _receive(self) -> None:
        while True:
            req_id, token = self._connection.recv()
            self._answers[req_id].put(token)
            if token.is_last:
                del self._answers[req_id]


def run_pipeline(connection: Connection, settings: dict[str, Any]) -> None:
    """Step while there are requests; newcomers join between two steps, as in any server of it."""
    openvino = importlib.import_module("openvino")
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    options = {"cache_size": 2, "enable_prefix_caching": False, **settings["options"]}
    for name, value in options.items():
        setattr(scheduler, name, value)
    properties = {
        "INFERENCE_NUM_THREADS": settings["num_threads"],
        "INFERENCE_PRECISION_HINT": _PRECISIONS[settings["dtype"]],
    }
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()
    live: dict[int, tuple[Any, int]] = {}
    """Handle and number of prompt tokens of each request."""

    def add(req_id: int, prompt: str, max_tokens: int) -> None:
        ids = tokenizer.encode(prompt).input_ids.data
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = True
        live[req_id] = pipeline.add_request(req_id, openvino.Tensor(ids), config), ids.shape[1]

    connection.send(f"openvino-genai {genai.__version__}")
    with contextlib.suppress(EOFError):
        while True:
            while connection.poll(0 if live else None):
                add(*connection.recv())
            pipeline.step()
            for req_id, (handle, num_prompt_tokens) in list(live.items()):
                if not handle.can_read():
                    continue
                (output,) = handle.read().values()
                text = tokenizer.decode(output.generated_ids)
                is_last = output.finish_reason != genai.GenerationFinishReason.NONE
                connection.send((req_id, Token(text, num_prompt_tokens, is_last)))
                if is_last:
                    del live[req_id]


def main() -> None:
    """Serve until a signal ends it."""
    settings = json.loads(sys.argv[1])
    pipeline = PipelineProcess(settings)
    CompletionsServer(settings["port"], pipeline.submit, pipeline.version).serve_forever()


if __name__ == "__main__":  # the pipeline's process imports this file again
    main()
