"""Clients that leave: what is still computed for them, and what they leave behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowprefill.bench.soak.rig import holdings_of
from flowprefill.passes import Pass
from flowprefill.request import FinishReason, Request
from flowprefill.request_book import LiveRequest
from flowprefill.scheduler.tracked import Tracked
from flowprefill.server import TritonServer
from flowprefill_client import Client, ServerError
from tests.engine_harness import Harness, alone, patient, running, urgent, wait_until
from tests.factories import write_tiny_model
from tests.live_server import group_members, wait_for

C = 20
"""Tokens of a prompt of one tick."""
NUM_LAYERS = 2
MAX_LEN = 4096
MANY_SLICES = {"max_slice_ms": 0.001}
"""Tiles of 64 rows, attention slices of 16."""
PATIENT_WAIT_S = 240.0
ELSEWHERE = {
    9: ["tests/e2e/test_openai.py::test_a_client_that_leaves_during_prefill_ends_it"],
    10: ["tests/e2e/test_openai.py::test_a_client_that_leaves_the_queue_is_never_served"],
    11: ["tests/e2e/test_cancel.py::test_random_cancels_leave_nothing"],
    12: [
        "tests/unit/test_engine_queue.py::test_each_request_ends_once_whoever_is_first",
        "tests/property/test_engine.py::test_every_request_ends_once_with_the_tokens_it_gets_alone",
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, num_layers=NUM_LAYERS, max_len=MAX_LEN)


def test_a_prompt_sent_again_and_again_costs_what_ran_of_it(model: Path) -> None:
    """Row 9, ds4#333: the prefill goes on without its client, who tries again: work multiplies."""
    with running(model, **MANY_SLICES) as h:
        h.submit(patient(0, 64 * C))
        h.play()
        of_one = h.device.num_slices
    with running(model, **MANY_SLICES) as h:
        for req_id in range(1, 6):
            cancel = functools.partial(h.engine.cancel, req_id)
            h.at_slice(h.device.num_slices + 5, cancel)
            h.submit(patient(req_id, 64 * C, seed=0))
            assert h.end(req_id).finish_reason is FinishReason.CANCELLED
        h.submit(patient(0, 64 * C))
        h.play()
        assert h.device.num_slices == 5 * 6 + of_one
        assert h.engine.stats().num_prefill_tokens == 64 * C
    assert h.answer(0) == alone(model, patient(0, 64 * C))[0]


def test_nothing_is_computed_for_those_that_left_the_queue(model: Path) -> None:
    """Row 10, llama.cpp#13262: a queued request whose client has left still gets run."""
    waiting: list[int] = []

    def note() -> None:
        waiting.append(h.engine.stats().num_waiting)

    def leave() -> None:
        for req_id in range(10, 20):
            h.engine.cancel(req_id)

    with running(model, **MANY_SLICES) as h:
        h.submit(patient(0, 64 * C))
        h.play()
        of_one = h.device.num_slices
    with running(model, max_num_seqs=1, **MANY_SLICES) as h:
        h.at_slice(2, lambda: h.submit(*(patient(i, 64) for i in range(10, 20))))
        h.at_slice(4, note)
        h.at_slice(4, leave)
        h.at_slice(5, note)  # one boundary later
        h.submit(patient(0, 64 * C))
        h.play()
        assert waiting == [10, 0]
        assert h.device.num_slices == of_one
        assert h.engine.stats().num_cancelled == 10


def num_states() -> int:
    """Objects that exist for a request while it lives, in the whole process."""
    gc.collect()
    kinds = (LiveRequest, Tracked, Pass)
    return sum(type(thing) in kinds for thing in gc.get_objects())


def test_streams_left_at_random_moments_leave_nothing_behind(model: Path) -> None:
    """Row 11, lmdeploy#1788: after some hundred aborted streams the engine stalls or crashes."""
    num_streams, probe = 500, urgent(1, 50, max_tokens=20)
    expected = alone(model, probe)[1]
    states_before = num_states()
    draw = random.Random(num_streams)
    with running(model, **MANY_SLICES) as h:
        start = 0
        for req_id in range(100, 100 + num_streams):
            start += draw.randrange(12)
            stream = (patient, urgent)[draw.randrange(2)](
                req_id, draw.choice((1, 20, 64, 300)), max_tokens=200
            )
            h.at_slice(start, functools.partial(h.submit, stream))
            h.at_slice(start + draw.randrange(30), functools.partial(h.engine.cancel, req_id))
        h.submit(patient(0, 64))  # the actions are done while something runs
        h.play(PATIENT_WAIT_S)
        stats = h.engine.stats()
        assert stats.num_cancelled > num_streams // 2
        assert (stats.num_waiting, stats.num_prefilling, stats.num_decoding) == (0, 0, 0)
        assert stats.num_kv_blocks_used == stats.pass_bytes == 0
        h.submit(probe)
        h.play()
        assert h.answer(1) == expected
        # the engine's thread may be about to leave the last one when its answer is there
        wait_until(lambda: num_states() == states_before)


def rss_bytes(group: int) -> dict[int, int]:
    """Process id -> resident memory, of each process of a process group."""
    return {pid: holdings_of(pid).resident_bytes for pid in group_members(group)}


@pytest.mark.slow
def test_a_server_is_after_500_left_streams_as_it_was(server: TritonServer, client: Client) -> None:
    """Row 11, lmdeploy#1788: the same over the network, with what the server's processes hold."""
    text = "All work and no play makes Jack a dull boy. "
    greedy = {"temperature": 0}

    def probe() -> str:
        return client.generate("The capital of France is", max_tokens=24, sampling=greedy).text

    def leave(seed: int) -> None:
        draw = random.Random(seed)
        stream = client.stream(text * draw.choice((1, 8, 60, 250)), max_tokens=200)
        timer = threading.Timer(draw.uniform(0, 0.3), stream.cancel)
        timer.start()
        for _ in stream:
            pass
        timer.cancel()

    def is_idle() -> bool:
        stats = client.engine_stats()
        busy = ("num_waiting", "num_prefilling", "num_decoding", "num_kv_blocks_used")
        return not any(stats[name] for name in busy)

    expected = probe()
    held: list[dict[int, int]] = []
    with ThreadPoolExecutor(8) as pool:
        for first in (0, 250):  # until the KV cache has been written once, memory grows
            for done in [pool.submit(leave, seed) for seed in range(first, first + 250)]:
                done.result(PATIENT_WAIT_S)
            wait_for(is_idle, what="no request and no KV block in use")
            held.append(rss_bytes(server.pid))
    assert held[0].keys() == held[1].keys()
    assert all(held[1][pid] < 1.05 * before for pid, before in held[0].items())
    assert probe() == expected


def test_no_moment_of_an_abort_harms_others(model: Path) -> None:
    """Row 12, vllm PR#52969: an abort between "picked" and "checked" kills the whole engine.

    Several threads send and abort; four streams beside them must not notice.
    """
    num_requests = 2000
    controls = [patient(i, 30 + i, max_tokens=1500) for i in range(4)]
    with running(model) as h:
        h.submit(*controls)
        threads = [
            threading.Thread(target=send_and_abort, args=(h, number, num_requests // 4))
            for number in range(1, 5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT_WAIT_S)
        h.engine.close(math.inf)  # when all have ended
        stats = h.engine.stats()
        assert stats.num_failed == stats.num_rejected == 0
        assert stats.num_cancelled > num_requests // 4
    expected = alone(model, *controls)
    assert {req_id: h.answer(req_id) for req_id in expected} == expected


def send_and_abort(h: Harness, number: int, num_requests: int) -> None:
    """Short requests, each aborted at once or some slices after it was sent; some twice."""
    draw = random.Random(number)
    for req_id in range(10_000 * number, 10_000 * number + num_requests):
        request: Request = urgent(req_id, draw.choice((1, 16, 40)), max_tokens=3)
        sent_at = h.device.num_slices
        h.submit(request)
        patience = draw.choice((0, 0, 1, 3, 8))
        wait_until(lambda at=sent_at + patience, i=req_id: h.device.num_slices >= at or over(h, i))
        for _ in range(draw.choice((1, 1, 2))):
            h.engine.cancel(req_id)


def over(h: Harness, req_id: int) -> bool:
    return any(output.finish_reason for output in h.of(req_id))


@pytest.mark.parametrize("num_aborts", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_aborts_at_a_server_by_call_and_by_leaving_harm_no_neighbour(
    client: Client, num_aborts: int
) -> None:
    """Row 12, vllm PR#52969: the same over the network, by id and by closing the stream."""
    prompts = ["The capital of France is", "Once upon a time", "1 2 3 4 5", "Water boils at"]
    greedy = {"temperature": 0, "ignore_eos": True}

    def answer(prompt: str) -> str:
        return client.generate(prompt, max_tokens=80, sampling=greedy).text

    def keep_asking(prompt: str) -> set[str]:
        texts = {answer(prompt)}
        while not all(done.done() for done in aborting):
            texts.add(answer(prompt))
        return texts

    def send_and_abort(seed: int) -> None:
        draw = random.Random(seed)
        for number in range(num_aborts // 4):
            stream = client.stream(f"{seed} {number}", max_tokens=3, request_id=f"{seed}-{number}")
            by_call = functools.partial(client.cancel, stream.request_id)
            abort = draw.choice((stream.cancel, by_call))
            timer = threading.Timer(draw.uniform(0, 0.02), abort)
            timer.start()
            with contextlib.suppress(ServerError):  # told so, where nothing was sent before
                for _ in stream:
                    pass
            timer.join()

    expected = [answer(prompt) for prompt in prompts]
    num_before = client.engine_stats()["num_cancelled"]
    with ThreadPoolExecutor(8) as pool:
        aborting = [pool.submit(send_and_abort, seed) for seed in range(4)]
        answers = [pool.submit(keep_asking, prompt) for prompt in prompts]
        for done in aborting:
            done.result(PATIENT_WAIT_S)
        assert [texts.result(PATIENT_WAIT_S) for texts in answers] == [{text} for text in expected]
    assert client.engine_stats()["num_cancelled"] > num_before
