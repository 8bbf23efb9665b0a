"""The channel between client and engine process, over a real socketpair."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from flowprefill import errors
from flowprefill.wire import Channel, Kind, pack, pack_error, unpack_error


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_in_order_whatever_their_size(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    bodies = [0, list(range(300_000)), "x", {3: -1.5}, None]
    for body in bodies:
        left.send(pack(Kind.PONG, body))
    received: list[object] = []
    while len(received) < len(bodies):
        received += [body for _, body in right.receive()]
    assert received == bodies


def test_send_does_not_wait_for_a_peer_that_never_reads(pair: tuple[Channel, Channel]) -> None:
    for _ in range(100):
        pair[0].send(pack(Kind.PONG, "x" * 1_000_000))


def test_flushed_messages_are_read_before_the_end(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(pack(Kind.CLOSE, 1.0))
    left.flush(1.0)
    left.close()
    assert right.receive() == [(Kind.CLOSE, 1.0)]
    with pytest.raises(EOFError):
        right.receive()


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("model.json: policy='x'"),
        errors.InvalidParameterError("top_p", 7, "in (0, 1]"),
        errors.ModelLoadError("no such file: \udcff.gguf"),
    ],
)
def test_errors_keep_type_and_message(
    pair: tuple[Channel, Channel], error: errors.FlowPrefillError
) -> None:
    left, right = pair
    left.send(pack(Kind.LOAD_FAILED, pack_error(error)))
    [(_, body)] = right.receive()
    received = unpack_error(body)
    assert type(received) is type(error)
    assert str(received) == str(error)


def test_an_error_type_of_elsewhere_becomes_the_base_error() -> None:
    assert type(unpack_error(["annotations", "text"])) is errors.FlowPrefillError
