"""Clients that never stop: each draws what to do next, does it, and notes what came of it.

Every request must come to an end within a bound. A control must give the same bytes whenever it is
answered, whatever its protocol and however often it lost its KV blocks; every answer must have as
many tokens as were asked for; a bad request must be refused by name. A request may only fail if an
engine was killed while it was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from flowprefill.bench.soak.asking import Answer, AnswerError, Ask, Asker
from flowprefill.bench.soak.bad_requests import BAD_REQUESTS, GENERATE, error_of
from flowprefill.bench.soak.controls import Controls
from flowprefill.bench.soak.record import ANSWERED, LEFT, LOST, REFUSED, Record
from flowprefill_client import AsyncStream, ServerError

_FREE = {"temperature": 0.7, "ignore_eos": True}
_DOCUMENT_TOKENS = (100, 1200)
_MEAN_PAUSE_S = 0.3
_CROWD_TOKENS = 1200
"""Of a prompt beside which, and a long control, no third one fits."""
_LEFT_TOKENS = 200
"""Asked for by those that leave."""

_Way = Callable[[Ask], Awaitable[Answer]]
"""One of the protocols, as the Asker has it."""


class Traffic:
    """The kinds of requests, and the controls' first answers."""

    def __init__(
        self,
        asker: Asker,
        make_prompt: Callable[[int], str],
        slo_classes: Sequence[str],
        end_s: float,
        seed: int,
    ) -> None:
        """end_s: by when each request must have come to its end, seconds."""
        self.record = Record()
        self.asker = asker
        self._make_prompt = make_prompt
        self._slo_classes = slo_classes
        self._end_s = end_s
        self._seed = seed
        self._controls = Controls(make_prompt, self._slo("document", 30_000.0))
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[str]]]] = {
            "control": (5, self._control),
            "chat": (3, self._chat),
            "document": (2, self._document),
            "crowd": (1, self._crowd),
            "leaves": (3, self._leaves),
            "cancelled by id": (1, self._cancelled_by_id),
            "disconnects": (3, self._disconnects),
            "bad": (3, self._bad),
        }

    async def learn_controls(self) -> None:
        """Raises BenchmarkError."""
        await self._controls.learn(self.asker)

    async def check_controls(self) -> None:
        """Each control once more, over each protocol, and one that surely loses its KV blocks."""
        for number in range(len(self._controls.asks)):
            for way in self._ways():
                await self._do("control", partial(self._compare, number, way))
        await self._do("crowd", partial(self._crowd, random.Random(self._seed)))

    async def run_client(self, index: int, done: asyncio.Event) -> None:
        """Send one request after the other until `done`."""
        rng = random.Random(self._seed * 1000 + index)
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while not done.is_set():
            (name,) = rng.choices(names, weights)
            await self._do(name, partial(self._kinds[name][1], rng))
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), rng.expovariate(1 / _MEAN_PAUSE_S))

    async def _do(self, name: str, send: Callable[[], Awaitable[str]]) -> None:
        record = self.record
        begin_s = time.monotonic()
        try:
            outcome = await asyncio.wait_for(send(), self._end_s)
        except (TimeoutError, asyncio.TimeoutError):
            record.num_hung += 1
            record.note(f"{name}: no end within {self._end_s:g} s")
            return
        except AnswerError as error:
            explained = self._outcome_of(name, error, begin_s)
            if explained is None:
                record.note_wrong(f"{name}: {error}")
                return
            outcome = explained
        except Exception as error:  # no connection, or an answer that lacks what it must have
            record.note_wrong(f"{name}: {error!r}")
            return
        record.slowest_s = max(record.slowest_s, time.monotonic() - begin_s)
        record.outcomes[(name, outcome)] += 1

    def _outcome_of(self, name: str, error: AnswerError, begin_s: float) -> str | None:
        """What an error is if the kills explain it. Controls are the same requests each time."""
        if error.is_suspected and name == "control" and len(self.record.kill_times_s) > 1:
            return REFUSED
        is_lost = error.is_engine_lost and self.record.was_killed_since(begin_s)
        return LOST if is_lost else None

    # ---- kinds ----

    async def _control(self, rng: random.Random) -> str:
        return await self._compare(
            rng.randrange(len(self._controls.asks)), rng.choice(self._ways())
        )

    async def _chat(self, rng: random.Random) -> str:
        prompt = self._make_prompt(rng.randint(8, 80))
        ask = Ask(prompt, rng.randint(4, 48), _FREE, self._slo("chat", 250.0))
        await self._answer(ask, rng.choice(self._ways()))
        return ANSWERED

    async def _document(self, rng: random.Random) -> str:
        prompt = self._make_prompt(rng.randint(*_DOCUMENT_TOKENS))
        ask = Ask(prompt, rng.randint(1, 12), _FREE, self._slo("document", 30_000.0))
        await self._answer(ask, rng.choice(self._ways()))
        return ANSWERED

    async def _crowd(self, rng: random.Random) -> str:
        """More than the KV cache holds: the last one, most urgent, takes the blocks of a control in
        the middle of its answer."""
        number = rng.choice(self._controls.long)
        control = self._controls.asks[number]
        filler = Ask(self._make_prompt(_CROWD_TOKENS), _LEFT_TOKENS, _FREE, control.slo)
        urgent = Ask(self._make_prompt(_CROWD_TOKENS), 1, _FREE, {"ttft_slo_ms": 10_000.0})
        try:
            async with self._stream(filler) as before:
                await anext(before)
                async with self._stream(control) as answer:
                    texts = [(await anext(answer)).text]
                    last = asyncio.ensure_future(self._answer(urgent, self.asker.grpc))
                    try:
                        texts += [delta.text async for delta in answer]
                        await last
                    finally:
                        last.cancel()
        except ServerError as error:
            raise AnswerError(str(error)) from error
        self._check(number, "".join(texts))
        return ANSWERED

    def _stream(self, ask: Ask) -> AsyncStream:
        return self.asker.client.stream(
            ask.prompt, max_tokens=ask.max_tokens, sampling=ask.sampling, **ask.slo
        )

    async def _leaves(self, rng: random.Random) -> str:
        """A gRPC client that cancels, at any moment of its request."""

        async def leave(stream: AsyncStream) -> None:
            stream.cancel()

        return await self._end_early(rng, leave)

    async def _cancelled_by_id(self, rng: random.Random) -> str:
        """Somebody else cancels it, and is told whether there was anything to cancel."""

        async def cancel(stream: AsyncStream) -> bool:
            return await self.asker.client.cancel(stream.request_id)

        return await self._end_early(rng, cancel)

    async def _end_early(
        self, rng: random.Random, cancel: Callable[[AsyncStream], Awaitable[bool | None]]
    ) -> str:
        begin_s = time.monotonic()
        prompt = self._make_prompt(rng.choice((20, 300, 1200)))
        stream = self._stream(Ask(prompt, _LEFT_TOKENS, _FREE, {}))

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.ensure_future(read())
        was_cancelled = False
        try:
            await asyncio.wait({reading}, timeout=rng.uniform(0, 0.6))
            # So many are left that it cannot come to its end before the server hears of it.
            is_surely_live = 0 < stream.completion().num_output_tokens <= _LEFT_TOKENS // 2
            was_found = await cancel(stream)
            await reading
        except ServerError as error:
            if "cancelled" not in str(error):
                raise AnswerError(str(error)) from error
            was_cancelled = True
        finally:
            reading.cancel()
        if fault := cancel_fault(was_found, was_cancelled, is_surely_live):
            raise AnswerError(fault)
        if is_surely_live:
            self.record.departures_s.append((begin_s, time.monotonic()))
        return LEFT

    async def _disconnects(self, rng: random.Random) -> str:
        """An HTTP client whose connection closes: half a request, or half an answer."""
        if rng.random() < 0.3:
            await self._half_request(rng)
            return LEFT
        send = rng.choice(self._ways()[1:])
        ask = Ask(self._make_prompt(rng.choice((20, 300))), 100, _FREE, {})
        asking = asyncio.ensure_future(send(ask))
        await asyncio.wait({asking}, timeout=rng.uniform(0, 0.8))
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return LEFT

    async def _half_request(self, rng: random.Random) -> None:
        server = self.asker.server
        port = rng.choice((server.server.options.http_port, server.openai_port))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        path = "/v1/completions" if port == server.openai_port else "/v2/models/soak/generate"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        with contextlib.suppress(ConnectionError):  # the server need not read it
            writer.write(head.encode() + b'{"text_input": "He')
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _bad(self, rng: random.Random) -> str:
        bad = rng.choice(BAD_REQUESTS)
        server = self.asker.server
        base = server.http_url if bad.route == GENERATE else server.openai_url
        status, text = await self.asker.post(f"{base}/{bad.route}", bad.data)
        error = AnswerError(error_of(text))
        if error.is_engine_lost:
            raise error
        if fault := bad.fault(status, text):
            raise AnswerError(fault)
        return REFUSED

    # ---- small parts ----

    async def _answer(self, ask: Ask, way: _Way) -> str:
        """The whole answer. Raises AnswerError if it has not as many tokens as were asked for."""
        answer = await way(ask)
        if answer.num_tokens != ask.max_tokens:
            raise AnswerError(f"{answer.num_tokens} tokens where {ask.max_tokens} were asked for")
        return answer.text

    async def _compare(self, number: int, way: _Way) -> str:
        self._check(number, await self._answer(self._controls.asks[number], way))
        return ANSWERED

    def _check(self, number: int, text: str) -> None:
        """Of a control."""
        if fault := self._controls.fault(number, text):
            self.record.num_changed += 1
            self.record.note(fault)

    def _ways(self) -> list[_Way]:
        a = self.asker
        return [a.grpc, a.generate_stream, a.completion, a.completion_stream]

    def _slo(self, name: str, ttft_slo_ms: float) -> dict[str, Any]:
        return {"slo_class": name} if name in self._slo_classes else {"ttft_slo_ms": ttft_slo_ms}


def cancel_fault(was_found: bool | None, was_cancelled: bool, is_surely_live: bool) -> str | None:
    """What is wrong with the answer to a cancellation by id; None if nothing.

    was_found: what it said; None: nobody asked. was_cancelled: what the request's client was told.
    """
    if was_found is None:
        return None
    if is_surely_live and not was_found:
        return "a cancellation by id found nothing, and the request was in the middle of its answer"
    if is_surely_live and not was_cancelled:
        return "a cancellation by id said that it did, and the request was answered in full"
    if was_cancelled and not was_found:
        return "a cancellation by id found nothing, and the request ended as cancelled"
    return None
