"""A headless run of the load test as a user starts it, and stand-in servers to run it against."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

LOCUSTFILE = Path(__file__).parents[2] / "clients" / "loadtest" / "locustfile.py"
TIMEOUT_S = 90.0
MEETING_TIMEOUT_S = 60.0
ERROR = "[INVALID_ARG] slo_class: no such class"


class LocustRun:
    """locust in a process of its own, with its web UI on a port or without one."""

    def __init__(
        self, directory: Path, host: str, *arguments: str, web_port: int | None = None
    ) -> None:
        self._prefix = directory / "locust"
        web = ["--web-port", str(web_port)] if web_port else ["--headless"]
        self._process = subprocess.Popen(
            [Path(sys.executable).parent / "locust", "-f", LOCUSTFILE, "--host", host, *web,
             "--only-summary", "--stop-timeout", "30", "--csv", self._prefix, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory,
        )  # fmt: skip

    def finish(self) -> tuple[int, str]:
        """Wait; returns exit code and what was printed."""
        with self._process:
            try:
                output, _ = self._process.communicate(timeout=TIMEOUT_S)
            finally:
                self._process.kill()
        return self._process.returncode, output

    def stop(self) -> tuple[int, str]:
        """End it before its time; returns what finish() does."""
        self._process.terminate()
        return self.finish()

    def has_answers(self, names: Collection[str]) -> bool:
        """Each of them has a first answer in its statistics, which locust writes every second."""
        try:
            rows = self.table("stats")
        except FileNotFoundError:  # it has just begun
            return False
        return {row["Name"] for row in rows if int(row["Request Count"] or 0)} >= set(names)

    def table(self, name: str) -> list[dict[str, str]]:
        """Rows of PREFIX_name.csv."""
        with open(f"{self._prefix}_{name}.csv", newline="") as file:
            return list(csv.DictReader(file))


class Meeting:
    """Holds requests until `num_held` of them are there together and a refused user has come again.

    num_users: how many send requests that are refused
    """

    def __init__(self, num_held: int, num_users: int) -> None:
        self._num_missing = num_held
        self._num_refusals_missing = num_users + 1
        self._changed = threading.Condition()

    @property
    def has_met(self) -> bool:
        return self._num_missing <= 0 and self._num_refusals_missing <= 0

    def hold(self) -> None:
        """Raises TimeoutError if the others do not come."""
        with self._changed:
            self._num_missing -= 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.has_met, MEETING_TIMEOUT_S):
                raise TimeoutError

    def refuse(self) -> None:
        with self._changed:
            self._num_refusals_missing -= 1
            self._changed.notify_all()


@contextlib.contextmanager
def grpc_stand_in(meeting: Meeting) -> Iterator[str]:
    """Answers requests with a class after the meeting and refuses others; gives its address."""

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
            (request,) = list(request_iterator)
            if "slo_class" not in request.parameters:
                meeting.refuse()
                yield service_pb2.ModelStreamInferResponse(error_message=ERROR)
                return
            meeting.hold()
            yield grpc_part("None")
            yield grpc_part("length")

    server = grpc.server(ThreadPoolExecutor(40))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def grpc_part(reason: str) -> Any:
    """One part of an answer, encoded as tritonserver does."""
    message = service_pb2.ModelStreamInferResponse()
    for name, text in (("text_output", "a"), ("finish_reason", reason)):
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        data = np.uint32(len(text)).tobytes() + text.encode()
        message.infer_response.raw_output_contents.append(data)
    message.infer_response.outputs.add(name="num_output_tokens", datatype="UINT32", shape=[1])
    message.infer_response.raw_output_contents.append(np.uint32(1).tobytes())
    return message


@contextlib.contextmanager
def http_stand_in(meeting: Meeting) -> Iterator[str]:
    """The same over generate_stream."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "slo_class" not in body:
                meeting.refuse()
                self.reply(400, [json.dumps({"error": ERROR})])
                return
            meeting.hold()
            part = {"text_output": "a", "num_output_tokens": 1}
            reasons = ("None", "length")
            self.reply(
                200, [f"data: {json.dumps({**part, 'finish_reason': r})}\n\n" for r in reasons]
            )

        def reply(self, status: int, chunks: list[str]) -> None:
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in [*chunks, ""]:
                self.wfile.write(f"{len(chunk):x}\r\n{chunk}\r\n".encode())

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # all users connect at once

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
