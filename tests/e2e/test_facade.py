"""model_repository/smollm2_sync: one answer per request, many requests at once, true errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from flowprefill.server import TritonServer
from flowprefill_client import Client
from tests.e2e.conftest import SYNC_MODEL, wait_for

LONG_ANSWER = {"max_tokens": 4000, "ignore_eos": True}
PROMPT = "Count to a thousand: one, two, three,"


def inputs(text: str, **sampling: Any) -> list[Any]:
    tensors = []
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps(sampling))):
        tensor = grpcclient.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
        tensors.append(tensor)
    return tensors


@pytest.fixture
def idle_engine(client: Client) -> Iterator[Client]:
    """Fails if a test leaves work behind in the engine."""
    yield client
    wait_for(lambda: not client.engine_stats()["num_decoding"], 10, "nothing is left decoding")


def test_requests_run_side_by_side(server: TritonServer, idle_engine: Client) -> None:
    texts: list[bytes] = []

    def ask() -> None:
        with grpcclient.InferenceServerClient(server.grpc_url) as grpc:
            reply = grpc.infer(SYNC_MODEL, inputs(PROMPT, max_tokens=100, ignore_eos=True))
            texts.append(reply.as_numpy("text_output")[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: idle_engine.engine_stats()["num_decoding"] >= 2, 10, "two decode together")
    for thread in threads:
        thread.join(60)
    assert len(texts) == 3


def test_codes_of_errors_survive_the_call_between_models(grpc: Any) -> None:
    with pytest.raises(InferenceServerException, match="top_p") as refused:
        grpc.infer(SYNC_MODEL, inputs("x", top_p=7))
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="n=2") as refused:
        grpc.infer(SYNC_MODEL, inputs("x", n=2))
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_timeout_ends_the_request_in_the_engine(grpc: Any, idle_engine: Client) -> None:
    with pytest.raises(InferenceServerException, match="timeout") as expired:
        grpc.infer(SYNC_MODEL, inputs(PROMPT, **LONG_ANSWER), timeout=300_000)
    assert expired.value.status() == "StatusCode.UNAVAILABLE"


def test_a_client_that_leaves_ends_the_request_in_the_engine(
    grpc: Any, idle_engine: Client
) -> None:
    call = grpc.async_infer(SYNC_MODEL, inputs(PROMPT, **LONG_ANSWER), callback=lambda **_: None)
    wait_for(lambda: idle_engine.engine_stats()["num_decoding"], 10, "decoding")
    call.cancel()
