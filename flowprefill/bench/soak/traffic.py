"""Clients that never stop: each draws what to do next, does it, and notes what came of it.

Every request must come to an end within a bound. A control must give the same bytes whenever it is
answered, whatever its protocol; a bad request must be refused by name. A request may only fail if
an engine was killed while it was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.soak.asking import AnswerError, Ask, Asker
from flowprefill.bench.soak.bad_requests import BAD_REQUESTS, GENERATE

CONTROL_PROMPTS = (
    "The capital of France is",
    "A short story about a lighthouse keeper:",
    "Water boils at a temperature of " * 40,
)
CONTROL_SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 7, "ignore_eos": True},
)
CONTROL_TOKENS = 24
_FREE = {"temperature": 0.7, "ignore_eos": True}
_DOCUMENT_TOKENS = (100, 1200)
_MEAN_PAUSE_S = 0.3
_MAX_PROBLEMS = 20
_MISSED_S = 0.5

ANSWERED, LEFT, REFUSED, LOST = "answered", "left", "refused", "lost"
OUTCOMES = (ANSWERED, LEFT, REFUSED, LOST)


@dataclass
class Record:
    """What came of all requests so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Kind, outcome) -> requests."""
    kill_times_s: list[float] = field(default_factory=list)
    num_hung: int = 0
    num_changed: int = 0
    """Controls with other bytes than at first."""
    num_wrong: int = 0
    """Failed though no engine was killed, or answered though they were bad."""
    problems: list[str] = field(default_factory=list)
    """The first of these, in words."""
    slowest_s: float = 0.0

    def note(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem[:300])

    def was_killed_since(self, begin_s: float) -> bool:
        """A request may also have come to an engine that was dead and not yet missed."""
        return any(kill_s > begin_s - _MISSED_S for kill_s in self.kill_times_s)


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
        self._first: dict[tuple[int, int], str] = {}
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[str]]]] = {
            "control": (5, self._control),
            "chat": (3, self._chat),
            "document": (2, self._document),
            "leaves": (3, self._leaves),
            "cancelled by id": (1, self._cancelled_by_id),
            "disconnects": (3, self._disconnects),
            "bad": (3, self._bad),
        }

    async def learn_controls(self) -> None:
        """The first answer of each control, one at a time. Raises BenchmarkError."""
        for key in self._control_keys():
            try:
                self._first[key] = await self.asker.grpc(self._control_ask(key))
            except AnswerError as error:
                raise BenchmarkError(f"control {key} has no answer: {error}") from error

    async def check_controls(self) -> None:
        """Each control once more, over each protocol."""
        for key in self._control_keys():
            for send in self._ways():
                await self._do("control", partial(self._compare, key, send))

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
            if not (error.is_engine_lost and record.was_killed_since(begin_s)):
                record.num_wrong += 1
                record.note(f"{name}: {error}")
                return
            outcome = LOST
        record.slowest_s = max(record.slowest_s, time.monotonic() - begin_s)
        record.outcomes[(name, outcome)] += 1

    # ---- kinds ----

    async def _control(self, rng: random.Random) -> str:
        return await self._compare(rng.choice(self._control_keys()), rng.choice(self._ways()))

    async def _chat(self, rng: random.Random) -> str:
        prompt = self._make_prompt(rng.randint(8, 80))
        ask = Ask(prompt, rng.randint(4, 48), _FREE, self._slo("chat", 250.0))
        await rng.choice(self._ways())(ask)
        return ANSWERED

    async def _document(self, rng: random.Random) -> str:
        prompt = self._make_prompt(rng.randint(*_DOCUMENT_TOKENS))
        ask = Ask(prompt, rng.randint(1, 12), _FREE, self._slo("document", 30_000.0))
        await rng.choice(self._ways())(ask)
        return ANSWERED

    async def _leaves(self, rng: random.Random) -> str:
        """A gRPC client that cancels, at any moment of its request."""
        return await self._end_early(rng, lambda stream: stream.cancel())

    async def _cancelled_by_id(self, rng: random.Random) -> str:
        """Somebody else cancels it."""

        async def cancel(stream: Any) -> None:
            await self.asker.client.cancel(stream.request_id)

        return await self._end_early(rng, cancel)

    async def _end_early(self, rng: random.Random, cancel: Callable[[Any], Any]) -> str:
        from flowprefill_client import ServerError

        prompt = self._make_prompt(rng.choice((20, 300, 1200)))
        stream = self.asker.client.stream(prompt, max_tokens=200, sampling=_FREE)

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.ensure_future(read())
        try:
            await asyncio.wait({reading}, timeout=rng.uniform(0, 0.6))
            pending = cancel(stream)
            if pending is not None:
                await pending
            await reading
        except ServerError as error:
            if "cancelled" not in str(error):
                raise AnswerError(str(error)) from error
        finally:
            reading.cancel()
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
        _, text = await self.asker.post(f"{base}/{bad.route}", bad.data)
        error = AnswerError(_error_of(text))
        if error.is_engine_lost:
            raise error
        if bad.word not in str(error) or not str(error):
            raise AnswerError(f"{bad.data[:80]!r} was answered {text!r}")
        return REFUSED

    # ---- small parts ----

    def _control_keys(self) -> list[tuple[int, int]]:
        samplings = range(len(CONTROL_SAMPLINGS))
        return [(p, s) for p in range(len(CONTROL_PROMPTS)) for s in samplings]

    def _control_ask(self, key: tuple[int, int]) -> Ask:
        prompt, sampling = key
        return Ask(CONTROL_PROMPTS[prompt], CONTROL_TOKENS, CONTROL_SAMPLINGS[sampling], {})

    async def _compare(self, key: tuple[int, int], send: Callable[[Ask], Awaitable[str]]) -> str:
        text = await send(self._control_ask(key))
        if text != self._first[key]:
            self.record.num_changed += 1
            self.record.note(f"control {key}: {text!r} instead of {self._first[key]!r}")
        return ANSWERED

    def _ways(self) -> list[Callable[[Ask], Awaitable[str]]]:
        a = self.asker
        return [a.grpc, a.generate_stream, a.completion, a.completion_stream]

    def _slo(self, name: str, ttft_slo_ms: float) -> dict[str, Any]:
        return {"slo_class": name} if name in self._slo_classes else {"ttft_slo_ms": ttft_slo_ms}


def _error_of(text: str) -> str:
    """The error in a JSON body of either server; "" if it is none."""
    try:
        error = json.loads(text).get("error", "")
    except (ValueError, AttributeError):
        return ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
