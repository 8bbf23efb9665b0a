"""Rig: the tritonserver of `flowprefill bench scenarios`, and the words its scenarios use.

C: tokens of a prompt whose prefill takes one tick. tick: the longest slice aimed at, 10 ms at
least. Solo: the same request on the idle server. So bars carry over to any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.servers import on_free_ports, sigterm_raises, write_model
from flowprefill.config import EngineConfig, SLOClass
from flowprefill.server import TritonServer, free_ports
from flowprefill_client import Client, Completion, Stream

BASE = "base"
"""The model of the configuration as it was given; it stays loaded beside a scenario's own."""
CLASSES = (SLOClass("high", ttft_slo_ms=60_000.0, rank=1), SLOClass("low", ttft_slo_ms=60_000.0))
"""All models have these two: whoever is served first is so by rank, not by deadline."""
MIN_TICK_MS = 10.0
GREEDY = {"temperature": 0, "ignore_eos": True}
_POLL_S = 0.002
_WAIT_S = 120.0
_CALIBRATION_TOKENS = (64, 512)
_CALIBRATIONS = 8


class Rig:
    """A tritonserver that runs inside the block of this context manager."""

    def __init__(self, config: EngineConfig, seed: int, rounds: int) -> None:
        """rounds: how often a scenario repeats what it measures."""
        from flowprefill.bench.prompts import prompt_maker
        from flowprefill.programs.model_spec import read_model_spec, resolve_model_path

        self.config = dataclasses.replace(config, slo_classes=CLASSES)
        self.rounds = rounds
        self.seed = seed
        self.make_prompt: Callable[[int], str] = prompt_maker(config, seed)
        spec = read_model_spec(resolve_model_path(config.model))
        self.max_model_len = config.max_model_len or spec.max_position_embeddings
        """L: prompt and generated tokens of one request at most."""
        self.kv_values_per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rig:
        with contextlib.ExitStack() as stack:
            directory = tempfile.TemporaryDirectory(prefix="flowprefill-bench-")
            self._repository = Path(stack.enter_context(directory))
            write_model(self._repository / BASE, self.config)
            stack.enter_context(sigterm_raises())
            self.server = stack.enter_context(TritonServer(on_free_ports(self._repository)))
            self.client = stack.enter_context(Client(self.server.grpc_url, BASE))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    # ---- what the words mean ------------------------------------------------------------------

    @property
    def tick_s(self) -> float:
        """One tick, seconds."""
        return max(self.config.max_slice_ms, MIN_TICK_MS) / 1000

    @property
    def cancel_latency_s(self) -> float:
        """How soon a client's departure is noticed, by the documentation, seconds."""
        return self.config.cancel_poll_ms / 1000

    @functools.cached_property
    def tokens_per_tick(self) -> int:
        """C, measured: from what a longer prompt takes beyond a shorter one."""
        few_s, many_s = (
            # The fastest of several: whatever else the machine does only adds to it
            min(solo_ttft_s(self, self.client, num) for _ in range(_CALIBRATIONS))
            for num in _CALIBRATION_TOKENS
        )
        few, many = _CALIBRATION_TOKENS
        per_token_s = (many_s - few_s) / (many - few)
        if per_token_s <= 0:
            raise BenchmarkError("a longer prompt took no longer: the machine is too noisy")
        return max(1, round(self.tick_s / per_token_s))

    def prompt_of(self, num_ticks: float) -> str:
        """A new prompt of so many times C tokens."""
        return self.make_prompt(self.num_tokens(num_ticks))

    def num_tokens(self, num_ticks: float) -> int:
        """So many times C. Raises BenchmarkError where the model takes no such prompt."""
        num_tokens = max(1, round(num_ticks * self.tokens_per_tick))
        if num_tokens >= self.max_model_len:
            raise BenchmarkError(
                f"{num_ticks:g} x C = {num_tokens} tokens: max_model_len is {self.max_model_len}"
            )
        return num_tokens

    # ---- models and endpoints -----------------------------------------------------------------

    @contextlib.contextmanager
    def model(self, name: str, **settings: Any) -> Iterator[Client]:
        """Load the configuration with other settings as a model called `name`; yields a client.

        At the end of the block it is unloaded, and its engine gone before the next scenario.
        """
        import tritonclient.http as triton

        config = dataclasses.replace(self.config, **settings)
        write_model(self._repository / name, config)
        control = triton.InferenceServerClient(self.server.http_url, network_timeout=_WAIT_S)
        try:
            control.load_model(name)
            try:
                with Client(self.server.grpc_url, name) as client:
                    client.generate(self.make_prompt(32), max_tokens=2, sampling=GREEDY)
                    yield client
            finally:
                control.unload_model(name)
                _wait_unloaded(control, name)
        finally:
            control.close()

    @functools.cached_property
    def openai_port(self) -> int:
        """Where the OpenAI endpoint listens, in front of this server; started when first asked."""
        from flowprefill.openai.process import OpenAIProcess

        (port,) = free_ports(1)
        process = OpenAIProcess("127.0.0.1", port, self.server.grpc_url, exit_timeout_s=5)
        self._stack.callback(process.stop)
        process.start(threading.Event())
        return port


def solo_ttft_s(rig: Rig, client: Client, num_tokens: int, **objectives: Any) -> float:
    """TTFT of a new prompt; the engine is idle before and after it."""
    wait_idle(client)
    answer = client.generate(
        rig.make_prompt(num_tokens), max_tokens=1, sampling=GREEDY, **objectives
    )
    return ttft_s(answer)


def ttft_s(answer: Completion) -> float:
    """Raises BenchmarkError for an answer without a token."""
    if answer.ttft_s is None:
        raise BenchmarkError("an answer without a token")
    return answer.ttft_s


def send_together(
    client: Client, prompts: Sequence[str], objectives: Mapping[str, Any], max_tokens: int = 1
) -> list[Stream]:
    """Hand over all prompts at once; returns without waiting for any answer."""
    return [
        client.stream(prompt, max_tokens=max_tokens, sampling=GREEDY, **objectives)
        for prompt in prompts
    ]


@contextlib.contextmanager
def reading(streams: Sequence[Stream]) -> Iterator[Callable[[], list[Completion]]]:
    """Read all streams meanwhile, each by a thread, so that each part is stamped as it comes.

    Yields a function that waits for their ends. What is unread at the end of the block is
    cancelled.
    """

    def read(stream: Stream) -> Completion:
        for _ in stream:
            pass
        return stream.completion()

    with ThreadPoolExecutor(max(1, len(streams))) as pool:
        answers = [pool.submit(read, stream) for stream in streams]
        try:
            yield lambda: [answer.result() for answer in answers]
        finally:
            for stream in streams:
                stream.cancel()


def _wait_unloaded(control: Any, name: str) -> None:
    """Wait until a model's last process has gone. Raises BenchmarkError after minutes."""

    def state() -> tuple[str, str]:
        index = control.get_model_repository_index()
        (model,) = (model for model in index if model["name"] == name)
        return model.get("state", ""), model.get("reason", "")

    limit_s = time.monotonic() + _WAIT_S
    while state() != ("UNAVAILABLE", "unloaded"):
        if time.monotonic() > limit_s:
            raise BenchmarkError(f"model {name!r} was not unloaded within {_WAIT_S} s")
        time.sleep(0.05)


def wait_stats(client: Client, is_there: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Ask the engine until its statistics are as wanted. Raises BenchmarkError after minutes."""
    limit_s = time.monotonic() + _WAIT_S
    while time.monotonic() < limit_s:
        stats = client.engine_stats()
        if is_there(stats):
            return stats
        time.sleep(_POLL_S)
    raise BenchmarkError(f"the engine did not come to what the scenario needs within {_WAIT_S} s")


def wait_idle(client: Client) -> dict[str, Any]:
    """Wait until no request is live. Returns the engine's statistics."""
    names = ("num_waiting", "num_prefilling", "num_decoding")
    return wait_stats(client, lambda stats: not any(stats[name] for name in names))
