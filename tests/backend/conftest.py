"""The backend outside the server: its API is imitated, the engine scripted, the rest is real."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.config import EngineConfig
from flowprefill.tokenizer import Tokenizer
from tests.backend import fake_pb_utils

fake_pb_utils.install()

from flowprefill_backend.claim import Claim  # noqa: E402
from flowprefill_backend.instance import Instance  # noqa: E402, needs the module installed above
from flowprefill_backend.workers import Worker  # noqa: E402
from tests.backend.scripted_engine import ScriptedEngine  # noqa: E402
from tests.factories import write_tiny_tokenizer  # noqa: E402

CONFIG = EngineConfig(model="tiny", ttft_slo_ms=700, tbt_slo_ms=70, cancel_poll_ms=20)


class Harness:
    """One loaded instance and its scripted engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        unload: Callable[[], object] | None = None,
        make_page: Callable[[Any], Any] = lambda info: None,
        claim: Claim | None = None,
        **config: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.log = fake_pb_utils.Logger
        self.log.lines.clear()
        self.engine: ScriptedEngine

        def make_engine(on_output: Callable[..., None]) -> ScriptedEngine:
            self.engine = ScriptedEngine(on_output, tokenizer.vocab_size)
            return self.engine

        config = dataclasses.replace(CONFIG, **config)
        self.instance = Instance(config, tokenizer, make_engine, self.log, unload, make_page, claim)

    def send(
        self,
        inputs: dict[str, Any],
        parameters: dict[str, Any] | None = None,
        request_id: str = "",
        sender: fake_pb_utils.ResponseSender | None = None,
    ) -> fake_pb_utils.ResponseSender:
        """Hand one request to execute(); returns what its client sees."""
        request = fake_pb_utils.InferenceRequest(inputs, parameters, request_id, sender)
        self.instance.execute([request])
        return request.sender

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def hold(worker: Worker) -> threading.Event:
    """Keep a worker busy until the event that is returned is set."""
    begun, gate = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(fake_pb_utils.WAIT_S)

    worker.post(wait)
    assert begun.wait(fake_pb_utils.WAIT_S)
    return gate


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Iterator[Harness]:
    harness = Harness(tokenizer)
    yield harness
    harness.instance.close()
