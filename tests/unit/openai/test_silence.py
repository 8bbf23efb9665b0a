"""The endpoint in front of a model server on a host that vanishes without closing a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from flowprefill.openai.app import SILENT, Settings
from tests.live_server import wait_for
from tests.unit.openai.conftest import WAIT_S, FakeServer, Running, running_endpoint


class Cable:
    """Passes connections on to a port. Once it is cut, those that are there stay open and carry
    nothing any more; new ones are passed on."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._cut = threading.Event()  # of the connections that are there now
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        self._cut.set()
        self._cut = threading.Event()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # it ended before
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._sockets += (near, far)
                for ends in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._carry, args=(*ends, self._cut))
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if not cut.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def cable(fake_server: tuple[FakeServer, grpc.Server, int]) -> Iterator[Cable]:
    cable = Cable(fake_server[2])
    yield cable
    cable.close()


@pytest.fixture
def running(fake_server: tuple[FakeServer, grpc.Server, int], cable: Cable) -> Iterator[Running]:
    fake, server, _ = fake_server
    settings = Settings(f"127.0.0.1:{cable.port}", exit_timeout_s=0.2, silence_s=2.4)
    with running_endpoint(settings, fake, server) as started:
        yield started


def test_answers_of_a_host_that_vanished_fail_and_the_next_ones_come_over_new_connections(
    running: Running, cable: Cable
) -> None:
    with ThreadPoolExecutor(2) as pool:
        bodies = [{"prompt": "wait", "stream": stream} for stream in (True, False)]
        streamed, whole = [pool.submit(running.ask, body) for body in bodies]
        for _ in bodies:
            assert running.fake.live.acquire(timeout=WAIT_S)
        cable.cut()
    (status, events), (whole_status, answer) = streamed.result(), whole.result()
    assert (status, whole_status) == (200, 503)
    assert SILENT in events[-2] and SILENT in answer["error"]["message"]
    wait_for(lambda: running.ask({"prompt": "hello"})[0] == 200)


def test_a_server_that_refuses_questions_is_not_silent(running: Running) -> None:
    connection = running.send({"prompt": "wait", "stream": True, "request_id": "kept"})
    with connection:
        assert running.fake.live.acquire(timeout=WAIT_S)
        running.fake.refuses_questions = True
        wait_for(lambda: running.fake.num_refused == 4)  # a second apart: over silence_s
        assert (running.endpoint.num_live, running.fake.ended_early) == (1, [])
