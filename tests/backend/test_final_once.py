"""Promise 2: FINAL exactly once for every request, whatever happens, and nothing after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.errors import QueueFullError
from flowprefill.request import FinishReason
from flowprefill.tokenizer import Tokenizer
from tests.backend.conftest import Harness
from tests.backend.fake_pb_utils import ResponseSender

KINDS = ("arrive", "arrive", "arrive", "arrive badly", "arrive at a full queue", "token", "token",
         "break a send", "finish", "die", "cancel in engine", "leave", "cancel by id")  # fmt: skip
STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.booleans())


@dataclass
class Client:
    req_id: int
    sender: ResponseSender
    has_left: bool = False
    may_speak: bool = True
    """The engine has not said the end of it: a real one says nothing after that."""


class Play:
    """Runs steps against an instance whose threads interleave as they like."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.engine = harness.engine
        self.clients: list[Client] = []
        self.num_sends = 0

    def send(self, text: str, stream: bool, **parameters: Any) -> Client:
        self.num_sends += 1
        client = Client(self.num_sends, ResponseSender())
        inputs = {"text_input": text, "stream": stream}
        self.harness.send(inputs, parameters, f"id-{self.num_sends}", client.sender)
        return client

    def step(self, kind: str, index: int, flag: bool) -> None:
        if kind == "arrive":
            self.clients.append(self.send("the then", flag))
        elif kind == "arrive badly":
            self.clients.append(self.send("", flag))
        elif kind == "arrive at a full queue":
            self.engine.submit_error = QueueFullError("full")
            self.send("the", flag).sender.wait_final()
            self.engine.submit_error = None
        elif self.clients:
            self.touch(kind, self.clients[index % len(self.clients)])

    def touch(self, kind: str, client: Client) -> None:
        if kind == "leave":
            client.has_left = True
            client.sender.leave()
        elif kind == "cancel by id":
            self.clients.append(self.send("", False, cancel_id=f"id-{client.req_id}"))
        elif kind == "break a send":
            client.sender.fails_at = 1
        elif client.req_id in self.engine.submitted and client.may_speak:
            client.may_speak = kind == "token"
            if kind == "token":
                self.engine.say(client.req_id, 100)
            elif kind == "finish":
                self.engine.say(client.req_id, 100, FinishReason.LENGTH)
            elif kind == "die":
                self.engine.end(client.req_id, FinishReason.ERROR, "UNAVAILABLE", "died")
            else:
                self.engine.end(client.req_id, FinishReason.CANCELLED)

    def finish(self) -> None:
        """Bring every request that still lives to its end, half of them by closing."""
        for client in self.clients:
            if client.has_left:
                client.sender.wait_final()  # the poller must find it
        for client in self.clients[::2]:
            self.touch("finish", client)
        self.harness.instance.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=40))
def test_every_request_gets_final_exactly_once_and_is_left_alone_after_it(
    tokenizer: Tokenizer, steps: list[tuple[str, int, bool]]
) -> None:
    play = Play(Harness(tokenizer))
    for kind, index, flag in steps:
        play.step(kind, index, flag)
    play.finish()
    for client in play.clients:
        # Fails on a second FINAL, a send or an is_cancelled after it, and where none came.
        client.sender.wait_final()
        assert [r.error for r in client.sender.responses[:-1]].count(None) == (
            len(client.sender.responses) - 1
        )
    assert play.harness.instance._live.all() == []


def test_the_sender_of_these_tests_sees_what_it_is_there_for() -> None:
    sender = ResponseSender()
    sender.send(None, flags=1)
    sender.is_cancelled()
    assert sender.breaches == ["is_cancelled after FINAL"]
