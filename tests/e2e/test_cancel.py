"""Cancelling through the server frees the device and the KV cache, at any moment of a request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from flowprefill.server import TritonServer
from flowprefill_client import Client, ServerError, Stream
from tests.e2e.conftest import LONG_PROMPT, MODEL, wait_for


def is_idle(client: Client) -> bool:
    stats = client.engine_stats()
    busy = ("num_waiting", "num_prefilling", "num_decoding", "num_kv_blocks_used")
    return not any(stats[name] for name in busy)


def wait_idle(client: Client) -> None:
    wait_for(lambda: is_idle(client), what="no request and no KV block in use")


@pytest.fixture
def long_prefill(client: Client) -> Stream:
    """A request in the middle of its prefill."""
    wait_idle(client)
    stream = client.stream(LONG_PROMPT, request_id="long")
    wait_for(lambda: client.engine_stats()["num_prefilling"], what="prefill started")
    return stream


def leave(client: Client, stream: Stream) -> None:
    stream.cancel()


def cancel_by_id(client: Client, stream: Stream) -> None:
    assert client.cancel("long") is True


@pytest.mark.parametrize("cancel", [leave, cancel_by_id])
def test_cancelled_prefill_frees_its_blocks(
    client: Client,
    quarter_prefill_s: float,
    long_prefill: Stream,
    cancel: Callable[[Client, Stream], None],
) -> None:
    before = client.engine_stats()
    started_s = time.monotonic()
    cancel(client, long_prefill)
    wait_idle(client)
    assert time.monotonic() - started_s < quarter_prefill_s
    after = client.engine_stats()
    assert after["num_cancelled"] == before["num_cancelled"] + 1
    assert after["num_prefill_tokens"] == before["num_prefill_tokens"]


def test_cancel_by_id_tells_the_stream(client: Client, long_prefill: Stream) -> None:
    assert client.cancel("long") is True
    with pytest.raises(ServerError, match="cancelled"):
        next(long_prefill)


def test_unknown_id_cancels_nothing(client: Client) -> None:
    assert client.cancel("nobody") is False


def test_cancelled_decode_frees_its_blocks(client: Client) -> None:
    before = client.engine_stats()
    with client.stream(
        "Once upon a time", max_tokens=2000, sampling={"ignore_eos": True}
    ) as stream:
        assert next(stream).num_output_tokens == 1
        assert client.engine_stats()["num_decoding"] == 1
    wait_idle(client)
    assert client.engine_stats()["num_cancelled"] == before["num_cancelled"] + 1


def test_random_cancels_leave_nothing(server: TritonServer, client: Client) -> None:
    """Short and long requests, each left at a random moment, over several connections at once."""
    seeds = [random.Random(seed) for seed in range(4)]

    def run(rng: random.Random) -> None:
        with Client(server.grpc_url, MODEL) as own:
            for _ in range(15):
                prompt = LONG_PROMPT[: rng.choice([40, 400, 4000, 20_000])]
                stream = own.stream(prompt, max_tokens=200, sampling={"temperature": 0})
                timer = threading.Timer(rng.uniform(0, 0.4), stream.cancel)
                timer.start()
                for _ in stream:
                    pass
                timer.cancel()

    threads = [threading.Thread(target=run, args=(rng,)) for rng in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    wait_idle(client)
    stats = client.engine_stats()
    ends = ("num_finished", "num_cancelled", "num_failed")
    assert stats["num_started"] <= sum(stats[name] for name in ends) + stats["num_rejected"]
