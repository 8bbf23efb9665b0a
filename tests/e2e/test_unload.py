"""Unloading and reloading a model while requests run: nobody is lost, and nothing is waited for
without limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.server import ServerOptions, TritonServer
from flowprefill.server_layout import SHM_DIR
from flowprefill_client import Client, ServerError
from tests.e2e.conftest import MODEL, group_members, wait_for
from tests.live_server import is_unloaded, unload
from tests.metrics_page import settled

NAME = "changing"
PROMPT = "The capital of France is"
READY, RUNNING = "flowprefill_engine_ready", "vllm:num_requests_running"
ENDS = ("finished", "cancelled", "rejected", "failed")
GREEDY = {"temperature": 0, "max_tokens": 8}
ENDLESS = {"ignore_eos": True, "temperature": 0, "max_tokens": 8000}
MAX_MODEL_LEN = 8192
SLACK_S = 20
"""On two cores that others use as well; what is ended would go on for minutes."""


def write_model_json(repository: Path, **settings: Any) -> None:
    model_json = json.loads((repository / MODEL / "1" / "model.json").read_text())
    settings = {"max_model_len": MAX_MODEL_LEN, **settings}
    path = repository / NAME / "1" / "model.json"
    path.write_text(json.dumps({**model_json, **settings}))


@pytest.fixture
def model(http: Any, server: TritonServer, repository: Path) -> Iterator[Client]:
    """A model of its own, loaded."""
    (repository / NAME / "1").mkdir(parents=True, exist_ok=True)
    config = (repository / MODEL / "config.pbtxt").read_text()
    (repository / NAME / "config.pbtxt").write_text(config)
    write_model_json(repository)
    http.load_model(NAME)
    with Client(server.grpc_url, NAME) as client:
        yield client
    unload(http, NAME)


def left_over(server: TritonServer) -> tuple[int, int]:
    """Processes, and files in shared memory, of the server."""
    files = list(SHM_DIR.glob(f"{server.shm_prefix}*"))
    return len(group_members(server.pid)), len(files)


def test_an_unload_ends_what_runs_at_the_exit_timeout(
    http: Any, model: Client, server: TritonServer
) -> None:
    loaded = left_over(server)
    stream = model.stream(PROMPT, sampling=ENDLESS)
    next(stream)
    begin_s = time.monotonic()
    http.unload_model(NAME)
    with pytest.raises(ServerError, match="the model is unloading") as told:
        list(stream)
    assert told.value.status == "UNAVAILABLE"
    took_s = time.monotonic() - begin_s
    limit_s = ServerOptions.exit_timeout_s
    assert limit_s <= took_s < limit_s + SLACK_S
    wait_for(lambda: is_unloaded(http, NAME), 20, "it is unloaded")
    wait_for(lambda: left_over(server)[0] < loaded[0], 20, "its processes have ended")
    assert left_over(server)[1] < loaded[1]
    page = settled(server, NAME, lambda p: p.value(READY) == 0, "no gauge is left")
    assert not any(page.gauges().values()) and page.total("vllm:cache_config_info") == 0
    assert page.requests("failed") >= 1
    assert page.requests("started") == sum(page.requests(end) for end in ENDS)


def test_an_unload_lets_what_runs_finish(http: Any, model: Client) -> None:
    stream = model.stream(PROMPT, sampling={**ENDLESS, "max_tokens": 60})
    next(stream)
    http.unload_model(NAME)
    assert sum(delta.num_output_tokens for delta in stream) == 59
    with pytest.raises(ServerError):
        model.generate(PROMPT, sampling=GREEDY)


def test_a_reload_under_load_loses_nobody(
    http: Any, model: Client, server: TritonServer, repository: Path
) -> None:
    loaded = left_over(server)
    expected = model.generate(PROMPT, sampling=GREEDY).text
    done = threading.Event()
    texts: list[str] = []
    failures: list[Exception] = []

    def run() -> None:
        with Client(server.grpc_url, NAME) as client:
            while not done.is_set():
                try:
                    texts.append(client.generate(PROMPT, sampling=GREEDY).text)
                except ServerError as error:
                    failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for length in (1024, 1536):
            write_model_json(repository, max_model_len=length)
            http.load_model(NAME)
            with pytest.raises(ServerError, match=f"max_model_len {length}"):
                model.generate(PROMPT, sampling={"max_tokens": 2000})
            num_answers = len(texts)
            wait_for(lambda n=num_answers: len(texts) > n + 10, what="answers of the new one")
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert set(texts) == {expected}
    wait_for(lambda: left_over(server) == loaded, 20, "the old ones have ended")


def test_a_reload_ends_what_runs_on_at_the_exit_timeout(
    http: Any, model: Client, server: TritonServer, repository: Path
) -> None:
    loaded = left_over(server)
    stream = model.stream(PROMPT, sampling=ENDLESS)
    next(stream)
    write_model_json(repository, max_model_len=1024)
    http.load_model(NAME)
    begin_s = time.monotonic()
    assert model.generate(PROMPT, sampling=GREEDY).text
    live = settled(server, NAME, lambda p: p.value(RUNNING) == 0, "the gauges are the new one's")
    assert live.value("flowprefill_requests_live") == 1, "of both"
    with pytest.raises(ServerError, match="the model was loaded anew") as told:
        list(stream)
    assert told.value.status == "UNAVAILABLE"
    assert time.monotonic() - begin_s < ServerOptions.exit_timeout_s + SLACK_S
    wait_for(lambda: left_over(server) == loaded, 20, "the old one has ended")
    page = settled(server, NAME, lambda p: not any(p.gauges().values()), "nothing runs")
    assert page.value(READY) == 1 and page.total("vllm:cache_config_info") == 1


def test_models_are_controlled_by_name(http: Any, model: Client, server: TritonServer) -> None:
    """Unloading one touches no other; an unknown one is an error by name."""
    with Client(server.grpc_url, MODEL) as other:
        stream = other.stream(PROMPT, sampling={**ENDLESS, "max_tokens": 100})
        next(stream)
        http.unload_model(NAME)
        assert sum(delta.num_output_tokens for delta in stream) == 99
    assert http.is_model_ready(MODEL) and not http.is_model_ready(NAME)
    with pytest.raises(Exception, match="no_such_model"):
        http.load_model("no_such_model")
