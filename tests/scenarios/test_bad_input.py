"""Prompts, sampling parameters and ids that kill other servers: only who sent them is affected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill.server import TritonServer
from flowprefill_client import Client, ServerError
from flowprefill_client.messages import generate_request, parse_response
from tests.live_server import MODEL, wait_for
from tests.openai_calls import post

ELSEWHERE = {
    18: [
        "tests/e2e/test_openai.py::test_a_bad_request_is_a_400_naming_the_field",
        "tests/backend/test_prompt.py::test_a_broken_prompt_is_refused_by_name",
        "tests/unit/test_engine.py::test_token_outside_the_vocabulary_is_refused",
    ],
    19: [
        "tests/e2e/test_bad_input.py::test_bad_sampling_parameter_is_named",
        "tests/unit/executor/test_sampler.py::test_a_non_finite_logit_fails_its_row_alone",
        "tests/unit/executor/test_sampler.py::test_penalties_that_overflow_fail_the_row",
    ],
    20: [
        "tests/backend/test_cancel.py::test_of_requests_that_share_an_id_the_latest_is_cancelled",
        "tests/e2e/test_openai.py::test_a_request_keeps_the_id_that_its_client_gave",
        "tests/unit/test_engine.py::test_id_in_use_is_refused_and_its_owner_unharmed",
    ],
}
ANSWER_S = 60
"""Within which a neighbour has its answer, or hangs."""
PROMPTS = ("A lighthouse keeper", "Once upon a time", "First, boil the", "In the year 1900")
CONTROL = {"temperature": 0, "ignore_eos": True, "max_tokens": 32}
BAD_PROMPTS = ("", [""], [], [999999], [-1], [2**40], [1.5], ["a", 1])
BAD_SAMPLING: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"top_p": 0},
    {"top_p": -1},
    {"top_p": 1.5},
    {"temperature": -1},
    {"temperature": 1e6},
    {"top_k": -5},
    {"top_k": 2**31},
    {"min_p": 2},
)
EXTREME_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-30},
    {"temperature": 100},
    {"top_p": 1e-30},
    {"top_k": 2**31 - 1},
    {"min_p": 1},
    {"repetition_penalty": 0.01, "temperature": 0.01},
    {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2},
    {"logit_bias": {"0": -100, "5": 100}},
)


@pytest.fixture(scope="module", autouse=True)
def neighbours(server: TritonServer) -> Iterator[None]:
    """Four streams, again and again, through all tests here; they stay as they are alone."""
    with Client(server.grpc_url, MODEL) as client:
        alone = [client.generate(prompt, sampling=CONTROL).text for prompt in PROMPTS]
    done = threading.Event()
    texts: list[list[str]] = [[] for _ in PROMPTS]

    failures: list[ServerError] = []

    def run(number: int) -> None:
        with Client(server.grpc_url, MODEL) as client:
            while not done.is_set() and not failures:
                try:
                    answer = client.generate(PROMPTS[number], sampling=CONTROL, timeout_s=ANSWER_S)
                    texts[number].append(answer.text)
                except ServerError as error:
                    failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join(2 * ANSWER_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert [set(answers) for answers in texts] == [{text} for text in alone]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_a_prompt_without_tokens_or_with_strange_ones_fails_alone(
    openai_port: int, client: Client, prompt: Any
) -> None:
    """Row 18, vllm#7283: no tokens, or an id that the vocabulary lacks, kills the engine."""
    for stream in (False, True):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": stream}
        response, answer = post(openai_port, "completions", body)
        assert response.status == 400, answer
        assert answer["error"]["param"].startswith("prompt")
    with pytest.raises(ServerError) as caught:
        client.generate(prompt, max_tokens=2)
    assert caught.value.status == "INVALID_ARG"


@pytest.mark.parametrize("sampling", BAD_SAMPLING, ids=str)
def test_sampling_out_of_range_is_refused(
    openai_port: int, client: Client, sampling: dict[str, Any]
) -> None:
    """Row 19, sglang#24874: repetition_penalty 0 gives inf, then NaN, and all ranks die."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, **sampling}
    response, answer = post(openai_port, "completions", body)
    assert response.status == 400
    assert answer["error"]["param"] == next(iter(sampling))
    with pytest.raises(ServerError, match=next(iter(sampling))) as caught:
        client.generate("Hello", sampling=sampling)
    assert caught.value.status == "INVALID_ARG"


@pytest.mark.parametrize("sampling", EXTREME_SAMPLING, ids=str)
def test_extreme_sampling_that_is_taken_gives_tokens(
    openai_port: int, sampling: dict[str, Any]
) -> None:
    """Row 19, sglang#24874: extreme temperature or top_p hangs the server."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, **sampling}
    response, answer = post(openai_port, "completions", body)
    assert response.status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def test_two_live_requests_of_one_id_do_not_disturb_each_other(client: Client) -> None:
    """Row 20, vllm#10583: two live requests with one id corrupt each other, hang, or crash."""
    long = {**CONTROL, "max_tokens": 64}
    alone = client.generate(PROMPTS[1], sampling=long).text
    before = client.engine_stats()["num_cancelled"]
    first = client.stream(PROMPTS[1], sampling=long, request_id="twin")
    texts = [next(first).text]
    second = client.stream(PROMPTS[2], sampling={**long, "max_tokens": 1000}, request_id="twin")
    next(second)
    assert client.cancel("twin") is True  # the later one
    with pytest.raises(ServerError, match="cancelled"):
        list(second)
    texts += [delta.text for delta in first]
    assert "".join(texts) == alone
    assert client.engine_stats()["num_cancelled"] == before + 1
    wait_for(lambda: client.cancel("twin") is False, what="nobody has that id")
    assert client.generate(PROMPTS[1], sampling=long, request_id="twin").text == alone


def test_one_id_twice_in_one_batch_is_answered_twice(client: Client, openai_port: int) -> None:
    """Row 20, vllm#10583: the same id twice in one batch."""
    alone = {prompt: client.generate(prompt, sampling=CONTROL).text for prompt in PROMPTS[:2]}
    requests = [generate_request(MODEL, prompt, "twin", CONTROL, {}) for prompt in alone]
    for request in requests:  # whole: their parts would say nothing of whose they are
        stream = next(tensor for tensor in request.inputs if tensor.name == "stream")
        stream.contents.bool_contents[0] = False
        request.inputs.add(
            name="exclude_input_in_output", datatype="BOOL", shape=[1]
        ).contents.bool_contents.append(True)
    answers = map(parse_response, client._stub.ModelStreamInfer(iter(requests), timeout=60))
    assert sorted(answer["text_output"] for answer in answers) == sorted(alone.values())
    body = {"model": MODEL, "prompt": list(alone), "request_id": "twin", **CONTROL}
    _, answer = post(openai_port, "completions", body)
    assert [choice["text"] for choice in answer["choices"]] == list(alone.values())
