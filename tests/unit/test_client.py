"""The client library against a scripted gRPC server that plays tritonserver on a real socket."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from flowprefill_client import AsyncClient, Client, ServerError, TokenLogprob
from tests.live_server import wait_for

WAIT_S = 10.0


def response(text: str, reason: str = "None", num_tokens: int = 1, **optional: str) -> Any:
    """One part of an answer, encoded as tritonserver does: raw little-endian contents."""
    message = service_pb2.ModelStreamInferResponse()
    infer = message.infer_response
    infer.parameters["triton_final_response"].bool_param = reason != "None"
    for name, value in {"text_output": text, "finish_reason": reason, **optional}.items():
        infer.outputs.add(name=name, datatype="BYTES", shape=[1])
        data = value.encode()
        infer.raw_output_contents.append(np.uint32(len(data)).tobytes() + data)
    for name, count in (("num_input_tokens", 7), ("num_output_tokens", num_tokens)):
        infer.outputs.add(name=name, datatype="UINT32", shape=[1])
        infer.raw_output_contents.append(np.uint32(count).tobytes())
    return message


def error(text: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=text)


LIKELY_A = '"9": {"logprob": -0.5, "rank": 2, "decoded_token": "a"}'
LIKELY_B = '"3": {"logprob": -0.1, "rank": 1, "decoded_token": "b"}'


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers by text_input: hello, bad, late, cut, likely; wait streams until its client left,
    and so does mute, without a text."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.ended_early: list[str] = []
        self.live = threading.Semaphore(0)
        self.engine_state = "ready"
        self.asked_for_state: list[str] = []

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        (request,) = list(request_iterator)  # one request per stream, then half-closed
        gone = threading.Event()

        def end() -> None:  # also called when nobody resumes this generator any more
            if kind == "wait":
                self.ended_early.append(request.id)
            gone.set()

        kind = request.inputs[0].contents.bytes_contents[0].decode()
        assert context.add_callback(end)
        if "engine_state" in request.parameters:
            self.asked_for_state.append(request.model_name)
            yield response(self.engine_state, "stop")
            return
        self.requests.append(request)
        if "cancel_id" in request.parameters:
            known = request.parameters["cancel_id"].string_param == "known"
            yield response("cancelled" if known else "not found", "stop")
        elif "engine_stats" in request.parameters:
            yield response(json.dumps({"num_decisions": 3}), "stop")
        elif "record_timeline" in request.parameters:
            yield from self.record(request.parameters["record_timeline"].double_param)
        elif kind in ("bad", "bad beside one that waits"):
            assert kind == "bad" or self.live.acquire(timeout=WAIT_S)
            yield error("[INVALID_ARG] Error generating stream: ttft_slo_ms=-1: must be > 0")
        elif kind == "late":
            yield response("so far ")
            yield error("engine died")
        elif kind == "cut":
            yield response("so far ")
        elif kind == "likely":
            yield response("a", logprobs=f"[{{{LIKELY_A}, {LIKELY_B}}}]")
            yield response("b", "length", logprobs=f"[{{{LIKELY_B}}}, {{{LIKELY_A}}}]")
        elif kind == "mute":
            while not gone.wait(0.001):
                yield response("")
        elif kind == "wait":
            yield response("first ")
            self.live.release()
            gone.wait(WAIT_S)
        else:
            yield response("Hel")
            yield response("", num_tokens=1)
            yield response("lo ✓", "length", num_tokens=2, timing='{"ttft_s": 0.25}')

    def record(self, seconds: float) -> Iterator[Any]:
        """A timeline that goes on until another request ends it; of 2 s: none, of 1 s: fails."""
        part = {"runs": [], "requests": []}
        if seconds == 0:
            self.live.release()
            yield response("ended", "stop")
        elif seconds == 2:
            yield response("once upon a time", "stop")
        else:
            yield response(json.dumps({**part, "end": ""}))
            if seconds == 1:
                yield error("[UNAVAILABLE] engine died")
            else:
                self.live.acquire(timeout=WAIT_S)
                yield response(json.dumps({**part, "end": "asked"}), "stop")


@pytest.fixture()
def triton() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # type: ignore[attr-defined]
    server.start()
    yield fake
    server.stop(None).wait()


@pytest.fixture()
def client(triton: FakeTriton) -> Iterator[Client]:
    with Client(triton.url, "m") as client:  # type: ignore[attr-defined]
        yield client


def client_threads() -> set[threading.Thread]:
    """All threads but the workers of the fake server."""
    return {t for t in threading.enumerate() if "ThreadPoolExecutor" not in t.name}


def objectives(request: Any) -> dict[str, float]:
    return {k: v.double_param for k, v in request.parameters.items() if k.endswith("_slo_ms")}


def tensors(request: Any) -> dict[str, Any]:
    return {t.name: [*t.contents.bytes_contents, *t.contents.bool_contents] for t in request.inputs}


def test_generate_adds_up_the_stream(client: Client) -> None:
    answer = client.generate("hello", request_id="mine")
    assert answer.text == "Hello ✓"
    assert answer.finish_reason == "length"
    assert answer.request_id == "mine"
    assert (answer.num_input_tokens, answer.num_output_tokens) == (7, 4)
    assert answer.ttft_s is not None
    assert len(answer.delta_times_s) == 3
    assert 0 < answer.ttft_s == answer.delta_times_s[0] <= answer.delta_times_s[2]


def test_objectives_travel_as_parameters_and_sampling_as_json(
    client: Client, triton: FakeTriton
) -> None:
    sampling = {"temperature": 0, "stop": ["a", "é"]}
    client.generate("hello", max_tokens=5, ttft_slo_ms=400, tbt_slo_ms=80.5, sampling=sampling)
    (request,) = triton.requests
    assert request.model_name == "m"
    assert objectives(request) == {"ttft_slo_ms": 400.0, "tbt_slo_ms": 80.5}
    inputs = tensors(request)
    assert json.loads(inputs.pop("sampling_parameters")[0]) == {"max_tokens": 5, **sampling}
    assert inputs == {
        "text_input": [b"hello"],
        "stream": [True],
        "return_finish_reason": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }


def test_without_objectives_the_model_decides(client: Client, triton: FakeTriton) -> None:
    client.generate("hello")
    assert set(triton.requests[0].parameters) == {"error_code_in_message"}


def test_class_and_tenant_travel_as_parameters_of_both_clients(
    client: Client, triton: FakeTriton
) -> None:
    async def scenario() -> None:
        async with AsyncClient(triton.url, "m") as client:  # type: ignore[attr-defined]
            await client.generate("hello", slo_class="chat", tenant="blue")

    client.generate("hello", slo_class="chat", tenant="blue")
    asyncio.run(scenario())
    for request in triton.requests:
        sent = {name: request.parameters[name].string_param for name in ("slo_class", "tenant")}
        assert sent == {"slo_class": "chat", "tenant": "blue"}


def test_timing_is_asked_for_as_a_parameter_of_both_clients_and_is_the_servers(
    client: Client, triton: FakeTriton
) -> None:
    async def scenario() -> dict[str, Any] | None:
        async with AsyncClient(triton.url, "m") as client:  # type: ignore[attr-defined]
            return (await client.generate("hello", return_timing=True)).timing

    timings = [client.generate("hello", return_timing=True).timing, asyncio.run(scenario())]
    assert timings == [{"ttft_s": 0.25}] * 2
    assert all(r.parameters["return_timing"].bool_param for r in triton.requests)
    stream = client.stream("wait", return_timing=True)
    next(stream)
    assert stream.completion().timing is None
    stream.cancel()


@pytest.mark.parametrize(
    ("prompt", "form", "text"),
    [
        ("[1]", None, "[1]"),
        ([5, 7], "token_ids", "[5,7]"),
        ([{"role": "user", "content": "é"}], "messages", '[{"role":"user","content":"é"}]'),
    ],
)
def test_a_prompt_travels_as_text_with_its_format(
    client: Client, triton: FakeTriton, prompt: Any, form: str | None, text: str
) -> None:
    client.generate(prompt, max_tokens=None)
    (request,) = triton.requests
    assert request.parameters["prompt_format"].string_param == (form or "")
    inputs = tensors(request)
    assert inputs["text_input"] == [text.encode()]
    assert json.loads(inputs["sampling_parameters"][0]) == {"max_tokens": None}


def test_logprobs_are_asked_for_and_read_token_by_token(client: Client, triton: FakeTriton) -> None:
    deltas = list(client.stream("likely", sampling={"logprobs": 1}))
    assert tensors(triton.requests[0])["return_logprobs"] == [True]
    first, second = TokenLogprob(9, "a", -0.5, 2), TokenLogprob(3, "b", -0.1, 1)
    assert [delta.logprobs for delta in deltas] == [((first, second),), ((second,), (first,))]
    answer = client.generate("likely", sampling={"logprobs": 1})
    assert answer.logprobs == ((first, second), (second,), (first,))


def test_each_request_gets_its_own_id(client: Client, triton: FakeTriton) -> None:
    answers = [client.generate("hello") for _ in range(3)]
    assert len({a.request_id for a in answers}) == 3
    assert [a.request_id for a in answers] == [r.id for r in triton.requests]


def test_server_errors_are_raised_with_the_servers_text(client: Client) -> None:
    with pytest.raises(ServerError, match=r"^Error generating stream: ttft_slo_ms=-1") as caught:
        client.generate("bad")
    assert caught.value.status == "INVALID_ARG"


def test_what_came_before_an_error_is_kept(client: Client) -> None:
    stream = client.stream("late")
    assert next(stream).text == "so far "
    with pytest.raises(ServerError, match="engine died") as caught:
        next(stream)
    assert caught.value.status is None
    assert stream.completion().text == "so far "
    assert stream.completion().finish_reason is None


def test_a_stream_that_just_ends_is_an_error(client: Client) -> None:
    with pytest.raises(ServerError, match="before the answer was complete"):
        client.generate("cut")


def test_leaving_the_block_early_cancels_on_the_server(client: Client, triton: FakeTriton) -> None:
    with client.stream("wait", request_id="left") as stream:
        for delta in stream:
            assert delta.text == "first "
            break
    wait_for(lambda: triton.ended_early == ["left"])
    assert stream.completion().finish_reason == "cancelled"


def test_cancel_ends_the_iteration_without_an_error(client: Client, triton: FakeTriton) -> None:
    stream = client.stream("wait", request_id="c")
    assert next(stream).text == "first "
    canceller = threading.Thread(target=stream.cancel)  # while this thread waits for more
    canceller.start()
    assert list(stream) == []
    canceller.join()
    wait_for(lambda: triton.ended_early == ["c"])


def test_cancelling_one_request_leaves_the_others_alone(client: Client, triton: FakeTriton) -> None:
    streams = [client.stream("wait", request_id=str(i)) for i in range(3)]
    for stream in streams:
        next(stream)
    streams[1].cancel()
    wait_for(lambda: bool(triton.ended_early))
    assert triton.ended_early == ["1"]
    assert client.generate("hello").text == "Hello ✓"
    assert triton.ended_early == ["1"]


def test_cancel_after_the_end_changes_nothing(client: Client) -> None:
    stream = client.stream("hello")
    list(stream)
    stream.cancel()
    assert stream.completion().finish_reason == "length"


def test_the_deadline_is_an_error_and_cancels(client: Client, triton: FakeTriton) -> None:
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED") as caught:
        client.generate("wait", request_id="slow", timeout_s=0.2)
    assert caught.value.status == "DEADLINE_EXCEEDED"
    wait_for(lambda: triton.ended_early == ["slow"])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[INVALID_ARG] top_p=7", "INVALID_ARG"),
        ("[INTERNAL] the server is stopping", "INTERNAL"),
        ("Server is stopping, scheduler for model has stopped accepting new inference requests",
         "UNAVAILABLE"),
        ("Request for unknown model: 'm' has no available versions", "UNAVAILABLE"),
        ("Request for unknown model: 'm' is not found", "NOT_FOUND"),
        ("Server not ready", "UNAVAILABLE"),
        ("Failed to process the request(s) for model instance 'm_0_0', message: Stub process "
         "'m_0_0_0' is not healthy.", "UNAVAILABLE"),
        ("Error generating stream: oops", None),
    ],
)  # fmt: skip
def test_what_tritonserver_says_without_a_code_has_one(text: str, status: str | None) -> None:
    found = ServerError.from_message(text)
    assert found.status == status and text.endswith(str(found))


def test_control_requests(client: Client, triton: FakeTriton) -> None:
    assert client.cancel("known") is True
    assert client.cancel("unknown") is False
    assert client.engine_stats() == {"num_decisions": 3}
    assert client.engine_state() == "ready"
    assert all(tensors(r) == {"text_input": [b""]} for r in triton.requests)


def test_a_timeline_comes_in_parts_and_can_be_ended(client: Client) -> None:
    parts = client.record_timeline(60)
    assert next(parts)["end"] == ""
    assert client.end_timeline() is True
    assert [part["end"] for part in parts] == ["asked"]


def test_a_timeline_that_fails_keeps_its_parts(client: Client) -> None:
    parts = client.record_timeline(1)
    assert next(parts)["end"] == ""
    with pytest.raises(ServerError, match="engine died"):
        next(parts)


def test_a_model_that_answers_with_text_records_no_timelines(client: Client) -> None:
    with pytest.raises(ServerError, match=r"a timeline was asked for.*'once upon a time'"):
        next(client.record_timeline(2))


def test_no_server_is_an_error_that_says_so() -> None:
    with Client("127.0.0.1:1", "m") as client, pytest.raises(ServerError, match="UNAVAILABLE"):
        client.generate("hello")


def test_close_cancels_what_runs_and_leaves_no_thread(triton: FakeTriton) -> None:
    before = client_threads()
    client = Client(triton.url, "m")  # type: ignore[attr-defined]
    next(client.stream("wait", request_id="open"))
    opened = client_threads() - before
    assert opened
    client.close()
    wait_for(lambda: triton.ended_early == ["open"])
    wait_for(lambda: not client_threads() & opened)


def test_async_close_cancels_what_runs_and_leaves_no_thread(triton: FakeTriton) -> None:
    async def scenario() -> set[threading.Thread]:
        async with AsyncClient(triton.url, "m") as client:  # type: ignore[attr-defined]
            stream = client.stream("wait", request_id="open")
            assert (await stream.__anext__()).text == "first "
            return client_threads() - before

    before = client_threads()
    opened = asyncio.run(scenario())  # none if another test has left gRPC's own running
    wait_for(lambda: triton.ended_early == ["open"])
    wait_for(lambda: not client_threads() & opened)


def test_async_client_does_the_same(triton: FakeTriton) -> None:
    async def scenario() -> None:
        async with AsyncClient(triton.url, "m") as client:  # type: ignore[attr-defined]
            answers = await asyncio.gather(*(client.generate("hello") for _ in range(3)))
            assert [a.text for a in answers] == ["Hello ✓"] * 3
            assert answers[0].num_output_tokens == 4
            with pytest.raises(ServerError, match="must be > 0"):
                await client.generate("bad")
            with pytest.raises(ServerError, match="before the answer was complete"):
                await client.generate("cut")
            with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
                await client.generate("wait", timeout_s=0.2)
            assert await client.cancel("known") is True
            assert await client.cancel("unknown") is False
            assert await client.engine_stats() == {"num_decisions": 3}
            assert await client.engine_state() == "ready"

    asyncio.run(scenario())


def test_async_leaving_early_cancels_and_so_does_cancelling_the_task(triton: FakeTriton) -> None:
    async def scenario() -> None:
        async with AsyncClient(triton.url, "m") as client:  # type: ignore[attr-defined]
            async with client.stream("wait", request_id="left") as stream:
                async for delta in stream:
                    assert delta.text == "first "
                    break
            assert stream.completion().finish_reason == "cancelled"
            await asyncio.to_thread(wait_for, lambda: "left" in triton.ended_early)

            stream = client.stream("wait", request_id="cancelled")
            assert (await stream.__anext__()).text == "first "
            stream.cancel()
            assert [delta async for delta in stream] == []
            await asyncio.to_thread(wait_for, lambda: "cancelled" in triton.ended_early)

            task = asyncio.create_task(client.generate("wait", request_id="task"))
            await asyncio.to_thread(wait_for, lambda: triton.requests[-1].id == "task")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_for, lambda: "task" in triton.ended_early)

    asyncio.run(scenario())


def test_async_client_says_that_it_needs_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("127.0.0.1:1")


def test_neither_client_nor_metrics_imports_torch() -> None:
    code = (
        "import sys, flowprefill_client, flowprefill.metrics;"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('flowprefill.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['flowprefill.version', 'flowprefill.metrics']"
