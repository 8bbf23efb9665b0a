"""What HTTP targets send and how they read answers, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from flowprefill.replay.errors import ReplayError, TargetError
from flowprefill.replay.http_targets import GenerateStreamTarget, OpenAITarget
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.targets import GrpcTarget, Part
from flowprefill.workload import Objective
from tests.unit.replay.sse_server import Send, openai_answer, sse_server

PLANNED = PlannedRequest(4, 0.0, 3, 2, Objective("text", 0.25, 0.1))
PROMPT = "one two three"
Answer = Callable[[dict[str, Any], Send], None]
HttpTarget = type[GenerateStreamTarget] | type[OpenAITarget]


def ask(
    kind: HttpTarget, answer: Answer, status: int = 200, **arguments: Any
) -> tuple[list[Part], tuple[str, dict[str, Any]]]:
    """Parts of one answer, and what the server was sent."""

    async def main(url: str) -> list[Part]:
        target = kind(url, "m", **arguments)
        try:
            await target.check()
            return [part async for part in target.send(target.prepare(PLANNED, PROMPT))]
        finally:
            await target.close()

    with sse_server(answer, status) as peer:
        parts = asyncio.run(main(peer.url))
        return parts, peer.requests[0]


def events(*sent: object) -> Answer:
    def answer(body: dict[str, Any], send: Send) -> None:
        for event in sent:
            send(event)

    return answer


def token(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def triton(finish_reason: str, **others: Any) -> dict[str, Any]:
    return {"text_output": "x", "finish_reason": finish_reason, "num_output_tokens": 1, **others}


def test_openai_may_be_told_the_deadline_as_a_priority() -> None:
    planned = dataclasses.replace(PLANNED, due_s=2.0)

    async def body() -> dict[str, Any]:
        target = OpenAITarget("127.0.0.1:1", "m", send_priority=True)
        try:
            message: dict[str, Any] = json.loads(target.prepare(planned, PROMPT))
            return message
        finally:
            await target.close()

    assert asyncio.run(body())["priority"] == 2250


def test_openai_is_asked_for_exact_lengths_and_not_for_objectives() -> None:
    parts, (path, body) = ask(OpenAITarget, openai_answer)
    assert parts == [Part(1), Part(1), Part(0, 3, 2)]
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }


def test_openai_is_sent_objectives_if_wanted() -> None:
    _, (_, body) = ask(OpenAITarget, openai_answer, send_slo=True)
    assert (body["ttft_slo_ms"], body["tbt_slo_ms"]) == (250.0, 100.0)


@pytest.mark.parametrize(
    ("end", "path"),
    [
        ("", "/v1/completions"),
        ("/v1/", "/v1/completions"),
        ("/v3/completions", "/v3/completions"),
    ],
)
def test_an_openai_url_may_be_the_server_s_or_its_api_s(end: str, path: str) -> None:
    async def send(url: str) -> None:
        target = OpenAITarget(url, "m")
        await target.check()
        async for _ in target.send(target.prepare(PLANNED, PROMPT)):
            pass
        await target.close()

    with sse_server(openai_answer) as peer:
        asyncio.run(send(peer.url.removeprefix("http://") + end))
        assert peer.requests[0][0] == path


def test_openai_tokens_without_text_count_and_an_end_without_token_does_not() -> None:
    answer = events(token(""), token(" a"), token("", "length"), "data: [DONE]\n\n")
    parts, _ = ask(OpenAITarget, answer)
    assert [part.num_tokens for part in parts] == [1, 1, 0]


def test_generate_stream_is_asked_for_counts_and_sent_objectives() -> None:
    last = triton("length", num_input_tokens=3, timing='{"ttft_s": 0.2}')
    parts, (path, body) = ask(GenerateStreamTarget, events(triton("None"), last))
    assert parts == [Part(1), Part(1, 3, server_ttft_s=0.2)]
    assert body["return_timing"] is True
    assert path == "/v2/models/m/generate_stream"
    assert body["text_input"] == PROMPT
    assert (body["ttft_slo_ms"], body["tbt_slo_ms"]) == (250.0, 100.0)
    assert json.loads(body["sampling_parameters"]) == {
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": 2,
    }


@pytest.mark.parametrize(
    ("kind", "answer", "status", "error"),
    [
        (OpenAITarget, events(token("a")), 200, "INCOMPLETE: the stream ended"),
        (OpenAITarget, events(), 200, "INCOMPLETE: the stream ended"),
        (OpenAITarget, events({"error": {"message": "full", "code": 503}}), 200, "ERROR: full"),
        (OpenAITarget, events('{"error": {"message": "no model"}}'), 404, "HTTP_404: no model"),
        (OpenAITarget, events("busy"), 503, "HTTP_503: busy"),
        (OpenAITarget, events("data: {oops\n\n"), 200, "BAD_ANSWER: event b'{oops'"),
        (OpenAITarget, events("data: 5\n\n"), 200, "BAD_ANSWER: event b'5'"),
        (OpenAITarget, events("data: " + 500_000 * "x" + "\n"), 200, "BAD_ANSWER"),
        (GenerateStreamTarget, events(triton("None")), 200, "INCOMPLETE"),
        (GenerateStreamTarget, events({"error": "[UNAVAILABLE] full"}), 200, "UNAVAILABLE: full"),
        (
            GenerateStreamTarget,
            events('data: {"error": "[INVALID_ARG] tbt_slo_ms: no"}\n\n'),
            400,
            "INVALID_ARG: tbt_slo_ms: no",
        ),
    ],
)
def test_failures_are_told_by_code(
    kind: HttpTarget, answer: Answer, status: int, error: str
) -> None:
    with pytest.raises(TargetError) as caught:
        ask(kind, answer, status)
    assert str(caught.value).startswith(error)


def test_a_connection_cut_midway_is_a_failure() -> None:
    def cut(body: dict[str, Any], send: Send) -> None:
        send(token("a"))
        send.__self__.connection.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]

    with pytest.raises(TargetError, match=r"UNAVAILABLE|INCOMPLETE"):
        ask(OpenAITarget, cut)


def test_nobody_there_is_said_before_and_told_of_each_request() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    async def main() -> None:
        for kind in (OpenAITarget, GenerateStreamTarget):
            target = kind(f"http://{address}", "m")
            with pytest.raises(ReplayError, match=address):
                await target.check()
            with pytest.raises(TargetError, match=r"^UNAVAILABLE: "):
                async for _ in target.send(target.prepare(PLANNED, PROMPT)):
                    pass
            await target.close()
        grpc_target = GrpcTarget(address, "m")
        with pytest.raises(ReplayError, match=address):
            await grpc_target.check()
        with pytest.raises(TargetError, match=r"^UNAVAILABLE: "):
            async for _ in grpc_target.send(grpc_target.prepare(PLANNED, PROMPT)):
                pass
        await grpc_target.close()

    asyncio.run(main())


def test_a_triton_model_that_is_not_ready_is_no_target() -> None:
    async def main(url: str) -> None:
        target = GenerateStreamTarget(url, "m")
        try:
            await target.check()
        finally:
            await target.close()

    with (
        sse_server(events(), is_ready=False) as peer,
        pytest.raises(ReplayError, match="m: the model is not ready"),
    ):
        asyncio.run(main(peer.url))


def test_over_grpc_too_objectives_and_exact_lengths_are_asked_for() -> None:
    async def main() -> dict[str, Any]:
        target = GrpcTarget("127.0.0.1:1", "m")
        message = target.prepare(PLANNED, PROMPT)
        await target.close()
        assert message.prompt == PROMPT
        return message.arguments

    assert asyncio.run(main()) == {
        "max_tokens": 2,
        "ttft_slo_ms": 250.0,
        "tbt_slo_ms": 100.0,
        "sampling": {"temperature": 0.0, "ignore_eos": True},
        "return_timing": True,
    }
