"""A real Engine on a tiny model whose slices can be counted and acted upon.

What a scenario does `at_slice` n happens on the engine thread, before the n-th slice it runs, so
the engine finds it at the boundary behind that slice, whatever the machine's speed. What it does
`at_token` is found before the next slice.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.executor.device import CpuDevice
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import SliceLimits
from flowprefill.request import FinishReason, Logprob, Request, TokenOutput
from tests.factories import make_request

WAIT_S = 30.0
PATIENT_S = 3000.0
"""A TTFT objective that any machine meets; half of it is the more urgent one."""
URGENT_S = 1500.0
QUEUE_TIMEOUT_S = 1000.0
PACK_TOKENS = 256
"""Of a packed prefill; instead of the saturation point, which is measured."""

Answer = list[tuple[int | None, float | None, list[Logprob], FinishReason | None]]
"""Token, logprob, top logprobs and finish reason of each output: all that load must not change."""


class ScriptedDevice(CpuDevice):
    """A CPU that runs an action of the scenario before a slice; slices count from 0."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.num_slices = 0
        self.actions: list[tuple[int, int, Callable[[], object]]] = []
        """A heap: slice, order of entry, what to do."""

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        """As on a CPU where our kernels run bf16, whichever instructions this one has."""
        tiles = super().slice_limits(spec, dtype, max_slice_s, is_native).key_tiles
        limits = super().slice_limits(spec, torch.bfloat16, max_slice_s, True)
        return dataclasses.replace(limits, key_tiles=tiles)

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        while self.actions and self.actions[0][0] <= self.num_slices:
            heapq.heappop(self.actions)[2]()
        self.num_slices += 1
        return run_slice(None)  # one by one


class Harness:
    """The engine, what it said, and at which slice."""

    def __init__(self, config: EngineConfig) -> None:
        self.changed = threading.Condition()
        self.outputs: list[TokenOutput] = []
        self.slices_at: list[int] = []
        """Slices run before each output."""
        self.num_submitted = 0
        self._order = itertools.count()
        self._at_token: dict[tuple[int, int], Callable[[], object]] = {}
        self.device = ScriptedDevice()
        with mock.patch("flowprefill.loading.make_device", lambda *args: self.device):
            self.engine = Engine(config, self._on_output)
        self.device.num_slices = 0  # those of the profile
        program = self.engine._model.program
        program.limits = dataclasses.replace(program.limits, decode_bytes=0)  # a layer is a slice
        scheduler = self.engine._scheduler
        limit = min(PACK_TOKENS, Granularity.parse(config.granularity).chunk_tokens or PACK_TOKENS)
        scheduler._options = dataclasses.replace(scheduler._options, max_pack_tokens=limit)

    def _on_output(self, output: TokenOutput) -> None:
        with self.changed:
            self.outputs.append(output)
            self.slices_at.append(self.device.num_slices)
            self.changed.notify_all()
        action = self._at_token.pop((output.req_id, len(self.of(output.req_id))), None)
        if action:
            action()

    def submit(self, *requests: Request, age_s: float = 0.0) -> None:
        """Hand over requests that arrived age_s before now."""
        arrival_s = time.monotonic() - age_s
        for request in requests:
            self.engine.submit(dataclasses.replace(request, arrival_s=arrival_s))
            self.num_submitted += 1

    def at_slice(self, number: int, action: Callable[[], object]) -> None:
        heapq.heappush(self.device.actions, (number, next(self._order), action))

    def at_token(self, req_id: int, number: int, action: Callable[[], object]) -> None:
        """As the request's number-th token is given, counted from 1."""
        self._at_token[req_id, number] = action

    def play(self, timeout_s: float = WAIT_S) -> None:
        """Run until every action has been done and every request has ended.

        Where all requests end before an action's slice comes, the action is due at once.
        """
        limit_s = time.monotonic() + timeout_s
        while True:
            with self.changed:
                left_s = limit_s - time.monotonic()
                assert self.changed.wait_for(self._is_at_rest, left_s), "requests do not end"
            if not self.device.actions:
                return
            heapq.heappop(self.device.actions)[2]()

    def _is_at_rest(self) -> bool:
        return sum(o.finish_reason is not None for o in self.outputs) == self.num_submitted

    def of(self, req_id: int) -> list[TokenOutput]:
        return [output for output in self.outputs if output.req_id == req_id]

    def tokens(self, req_id: int) -> list[int | None]:
        return [output.token_id for output in self.of(req_id)]

    def answer(self, req_id: int) -> Answer:
        return [(o.token_id, o.logprob, o.top_logprobs, o.finish_reason) for o in self.of(req_id)]

    def first_token_slice(self, req_id: int) -> int:
        """Slices run before the request's first output."""
        return self.slices_at[self.outputs.index(self.of(req_id)[0])]

    def first_token_order(self) -> list[int]:
        """Request ids by their first output."""
        return list(dict.fromkeys(output.req_id for output in self.outputs))

    def end(self, req_id: int, timeout_s: float = WAIT_S) -> TokenOutput:
        """Wait for the request's end."""

        def is_over() -> bool:
            return any(o.finish_reason for o in self.of(req_id))

        with self.changed:
            assert self.changed.wait_for(is_over, timeout_s), f"request {req_id} does not end"
            return self.of(req_id)[-1]

    def finish(self, timeout_s: float = WAIT_S) -> None:
        """Let everything end, stop the engine, and check that nothing is left or miscounted."""
        closer = threading.Thread(target=self.engine.close, args=(math.inf,), daemon=True)
        closer.start()
        closer.join(timeout_s)
        assert not closer.is_alive(), "the engine does not come to rest"
        ends = [o.req_id for o in self.outputs if o.finish_reason]
        assert len(ends) == len(set(ends)), "a request ended twice"
        for req_id in {o.req_id for o in self.outputs}:
            assert self.of(req_id)[-1].finish_reason, "something follows an end"
        stats = self.engine.stats()
        counted = stats.num_finished + stats.num_cancelled + stats.num_rejected + stats.num_failed
        assert stats.num_started == counted == len(ends)
        assert stats.num_waiting == stats.num_prefilling == stats.num_decoding == 0
        assert stats.num_kv_blocks_used == 0
        self.engine._scheduler.check_integrity()
        assert self.engine._runner.passes.is_empty


@contextmanager
def running(model: Path, **config: Any) -> Iterator[Harness]:
    """A harness that comes to rest, checked, at the end of the block."""
    # bf16: the tiny model's fp32 products are slow on some CPUs
    settings = {"device": "cpu", "dtype": "bfloat16", "queue_timeout_ms": QUEUE_TIMEOUT_S * 1000}
    harness = Harness(EngineConfig(model=str(model), **{**settings, **config}))
    try:
        yield harness
    except BaseException:
        harness.engine.close()
        raise
    harness.finish()


def alone(model: Path, *requests: Request, **config: Any) -> dict[int, Answer]:
    """Answers by request id, each with an engine's whole cache and nothing in it."""
    with running(model, **{"enable_prefix_caching": False, **config}) as h:
        for request in requests:
            h.submit(request)
            h.end(request.req_id)
    return {request.req_id: h.answer(request.req_id) for request in requests}


def wait_until(condition: Callable[[], object]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


def kv_bytes(num_tokens: int, num_layers: int) -> int:
    """Memory of the KV cache of so many tokens of a tiny model in bf16."""
    return num_tokens * 2 * num_layers * 32 * 2  # K and V, kv heads x head_dim, bytes of bf16


def patient(req_id: int, prompt_len: int = 300, **sampling: Any) -> Request:
    """A request that leaves the device to any urgent one."""
    sampling = {"max_tokens": 4, "ignore_eos": True, **sampling}
    return make_request(prompt_len, PATIENT_S, req_id=req_id, tbt_slo_s=PATIENT_S, **sampling)


def urgent(req_id: int, prompt_len: int = 20, **sampling: Any) -> Request:
    sampling = {"max_tokens": 4, "ignore_eos": True, **sampling}
    return make_request(prompt_len, URGENT_S, req_id=req_id, tbt_slo_s=PATIENT_S, **sampling)


def with_slo(request: Request, **slo: Any) -> Request:
    return dataclasses.replace(request, slo=dataclasses.replace(request.slo, **slo))
