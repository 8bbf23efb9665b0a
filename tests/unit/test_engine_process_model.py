"""EngineClient around the real Engine with a tiny model: what a user of both relies on."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from flowprefill.clock import Clock
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.engine_model import EngineModel, load_for_engine
from flowprefill.engine_process import EngineClient
from flowprefill.errors import EngineKillerError, FlowPrefillError
from flowprefill.granularity import Granularity
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.weights import OnProgress
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.supervision import Supervision
from tests.factories import make_request, write_tiny_model

WAIT_S = 60.0
MAX_LEN = 192
MAX_WAITING = 16
POISON = 7


class Submits(Protocol):
    def submit(self, request: Request) -> None: ...


class Outputs:
    """Collects outputs by request."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.of: dict[int, list[TokenOutput]] = {}

    def __call__(self, output: TokenOutput) -> None:
        with self.changed:
            self.of.setdefault(output.req_id, []).append(output)
            self.changed.notify_all()

    def first(self, req_id: int) -> TokenOutput:
        with self.changed:
            assert self.changed.wait_for(lambda: self.of.get(req_id), WAIT_S)
            return self.of[req_id][0]

    def end(self, req_id: int, timeout_s: float = WAIT_S) -> TokenOutput:
        def is_over() -> bool:
            return req_id in self.of and self.of[req_id][-1].finish_reason is not None

        with self.changed:
            assert self.changed.wait_for(is_over, timeout_s)
            return self.of[req_id][-1]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, max_len=MAX_LEN)
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_waiting_requests=MAX_WAITING,
    )


@pytest.fixture(scope="module")
def client(config: EngineConfig) -> Iterator[EngineClient]:
    client = EngineClient(config, lambda output: outputs_of_client(output), lambda line: None)
    client.start()
    yield client
    client.close()


outputs_of_client = Outputs()


@pytest.fixture
def outputs() -> Outputs:
    outputs_of_client.of.clear()
    return outputs_of_client


def requests() -> list[Request]:
    """Greedy, sampled, with logprobs, with a bias; prompts from one token to several tiles."""
    samplings = [
        {},
        {"temperature": 0.8, "seed": 3, "top_k": 20},
        {"logprobs": 4},
        {"logit_bias": {5: 100.0}},
    ]
    return [
        make_request(length, req_id=req_id, max_tokens=12, ignore_eos=True, **sampling)
        for req_id, (length, sampling) in enumerate(zip([1, 17, 60, 150], samplings, strict=True))
    ]


def answers(engine: Submits, outputs: Outputs) -> list[list[TokenOutput]]:
    """All outputs of `requests()`, without the fields that depend on time."""
    for request in requests():
        engine.submit(dataclasses.replace(request, arrival_s=time.monotonic()))
    for request in requests():
        outputs.end(request.req_id)
    return [
        [
            dataclasses.replace(o, token_s=0.0, num_preemptions=0, prefill=None)
            for o in outputs.of[r.req_id]
        ]
        for r in requests()
    ]


def test_outputs_are_those_of_the_in_process_engine(
    client: EngineClient, outputs: Outputs, config: EngineConfig
) -> None:
    direct = Outputs()
    engine = Engine(config, direct)
    try:
        expected = answers(engine, direct)
        assert engine.info == client.info
    finally:
        engine.close()
    assert all(len(answer) == 12 for answer in expected)
    assert answers(client, outputs) == expected


def test_what_an_over_full_queue_refuses_is_unavailable_with_the_numbers(
    client: EngineClient, outputs: Outputs
) -> None:
    """Far more at once than can start meanwhile; the others are served."""
    req_ids = range(1000, 1300)
    for req_id in req_ids:
        request = make_request(150, 1000.0, req_id=req_id, max_tokens=2, ignore_eos=True)
        client.submit(dataclasses.replace(request, arrival_s=time.monotonic()))
    ends = [outputs.end(req_id) for req_id in req_ids]
    refused = [end for end in ends if end.finish_reason is FinishReason.ERROR]
    served = [end for end in ends if end.finish_reason is FinishReason.LENGTH]
    assert len(refused) + len(served) == len(req_ids)
    assert len(served) >= MAX_WAITING and refused
    message = (
        rf"the queue is full \(max_waiting_requests={MAX_WAITING}\): {MAX_WAITING} requests with "
        rf"{MAX_WAITING * 150} prompt tokens wait, about \d+\.\d s of prefill"
    )
    for end in refused:
        assert end.error_code == "UNAVAILABLE"
        assert re.match(message, end.error_message or "")


def test_the_second_of_two_equal_prompts_is_found_cached(
    client: EngineClient, outputs: Outputs
) -> None:
    before = client.stats().num_cached_tokens
    texts = []
    for req_id in (1, 2):
        request = make_request(150, req_id=req_id, seed=77, max_tokens=8)
        client.submit(dataclasses.replace(request, arrival_s=time.monotonic()))
        outputs.end(req_id)
        texts.append([output.token_id for output in outputs.of[req_id]])
    assert texts[0] == texts[1]
    assert client.stats().num_cached_tokens - before == 144


def test_an_idle_engine_process_does_not_wake(client: EngineClient, outputs: Outputs) -> None:
    client.submit(make_request(20, req_id=1, max_tokens=3, arrival_s=time.monotonic()))
    outputs.end(1)
    deadline_s = time.monotonic() + WAIT_S
    while client.stats().num_kv_blocks_used:
        assert time.monotonic() < deadline_s
    before = client.stats()
    switches: dict[str, str] = {}
    while switches != (switches := context_switches(client)):  # until that answer has passed
        time.sleep(0.1)
        assert time.monotonic() < deadline_s
    time.sleep(1.0)  # the span that is measured
    assert context_switches(client) == switches
    after = client.stats()
    assert after.num_wakeups == before.num_wakeups
    assert after.num_decisions == before.num_decisions


def context_switches(client: EngineClient) -> dict[str, str]:
    """Times that each thread of the engine process, and the client's supervisor, went to sleep."""
    tasks = list(Path(f"/proc/{client.pid}/task").iterdir())
    tasks.append(Path(f"/proc/self/task/{client._thread.native_id}"))
    lines = {task.name: (task / "status").read_text().splitlines() for task in tasks}
    return {
        name: next(line for line in status if line.startswith("voluntary"))
        for name, status in lines.items()
    }


def test_a_failed_load_raises_what_the_engine_raises(config: EngineConfig, tmp_path: Path) -> None:
    broken = dataclasses.replace(config, model=str(tmp_path / "nothing-here"))
    with pytest.raises(FlowPrefillError) as direct:
        Engine(broken, Outputs())
    client = EngineClient(broken, Outputs(), lambda line: None)
    with pytest.raises(type(direct.value)) as across:
        client.start()
    assert str(across.value) == str(direct.value)


def test_after_sigkill_streams_end_and_the_restarted_engine_answers_the_same(
    client: EngineClient, outputs: Outputs
) -> None:
    before = answers(client, outputs)
    outputs.of.clear()
    client.submit(
        make_request(
            8, req_id=50, max_tokens=MAX_LEN - 8, ignore_eos=True, arrival_s=time.monotonic()
        )
    )
    outputs.first(50)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    end = outputs.end(50, timeout_s=2.0)
    assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
    assert answers(client, outputs) == before


def fragile_engine(
    config: EngineConfig, on_output: Callable[[TokenOutput], None], on_progress: OnProgress
) -> Engine:
    """The real one, in the engine process, with a program that fails on one token."""

    def load(config: EngineConfig, clock: Clock, on_progress: OnProgress) -> EngineModel:
        loaded = load_for_engine(config, clock, on_progress)
        prefill = loaded.model.program.prefill

        def fail(inputs: Sequence[SequenceInput], granularity: Granularity) -> ProgramState:
            if any(POISON in one.token_ids for one in inputs):
                raise RuntimeError("no such expert")
            return prefill(inputs, granularity)

        loaded.model.program.prefill = fail  # type: ignore[method-assign, assignment]
        return loaded

    return Engine(config, on_output, on_progress, load)


def test_a_prompt_on_which_two_engines_failed_is_refused(config: EngineConfig) -> None:
    outputs = Outputs()
    client = EngineClient(
        config,
        outputs,
        lambda line: None,
        engine_factory=f"{__name__}:{fragile_engine.__name__}",
        supervision=Supervision(backoff_s=0.01),
    )
    client.start()

    def submit(req_id: int, token_id: int) -> None:
        request = make_request(20, req_id=req_id, max_tokens=3, arrival_s=time.monotonic())
        request.prompt_token_ids[:] = [token_id] * 20
        client.submit(request)

    try:
        for req_id in (1, 2):
            submit(req_id, POISON)
            end = outputs.end(req_id)
            assert (end.error_code, end.reject_reason) == ("UNAVAILABLE", None)
            assert "code 1: the engine failed: RuntimeError: no such" in (end.error_message or "")
        with pytest.raises(EngineKillerError, match="died twice"):
            submit(3, POISON)
        submit(4, POISON + 1)
        assert outputs.end(4).error_code is None
        assert client.num_restarts == 2
    finally:
        client.close()
