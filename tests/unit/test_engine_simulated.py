"""The engine in virtual time and the simulator: the same decisions at the same moments.

Each slice takes what the profile says, and requests come between slices. So whatever a measured run
and its simulation differ in is the machine's, not the scheduler's or the loop's. One output token:
the simulator takes the sequences of a decode step to be of equal length.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flowprefill import loading
from flowprefill.clock import MonotonicClock, VirtualClock
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine, scheduler_options
from flowprefill.executor.device import CpuDevice
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.predictor.profile import Profile
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import Slice
from flowprefill.request import Request
from flowprefill.scheduler.events import Decision, Event, PrefillTask
from flowprefill.simulator.profiled import DeviceTimes, ProfiledPlatform
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.workload import Objective, TraceRequest
from tests.engine_harness import WAIT_S, kv_bytes
from tests.factories import make_request, write_tiny_model

LOAD = 1.3
MAX_TOKENS = 512
SLOWNESS = 1000.0
"""Times of a tiny model's slices, by this: its prefills then take seconds of virtual time."""

Choice = tuple[float, tuple[int, ...], float | None]
"""When, which prefill, when to decide again."""


class VirtualDevice(CpuDevice):
    """A slice takes what the profile says; requests that are due arrive while it runs."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.clock = VirtualClock()
        self.profile: Profile | None = None
        self.engine: Engine | None = None
        self.due: list[Request] = []

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        if self.engine is None:  # it is being profiled
            return run_slice(interrupt)
        end_s = self.clock.now_s() + profiled_s
        while self.due and self.due[0].arrival_s <= end_s:
            self.arrive()
        may_leave = run_slice(None)  # one by one
        self.clock.advance_to(end_s)
        return may_leave

    def arrive(self) -> None:
        """It is the time of the next request."""
        request = self.due.pop(0)
        self.clock.advance_to(max(request.arrival_s, self.clock.now_s()))
        assert self.engine is not None
        self.engine.submit(request)

    def profile_slowly(self, model: Any, clock: Any, on_progress: Any) -> Profile:
        """A time for each slice that does not depend on this machine; tokens are chosen in none."""
        found = loading.profile_model(model, MonotonicClock(), on_progress)
        samples = [(piece, SLOWNESS * usual_s(piece)) for piece, _ in found.samples]
        choices = [(rows, 0.0) for rows, _ in found.choices]
        self.profile = dataclasses.replace(found, samples=samples, choices=choices)
        return self.profile


def usual_s(piece: Slice) -> float:
    """About what a slice of the tiny model takes, seconds."""
    return 1e-6 * (50 + piece.num_layers * piece.num_rows * (1 + piece.num_keys / 200))


def choice_of(now_s: float, decision: Decision) -> Choice | None:
    task = decision.task
    return (now_s, task.req_ids, decision.timer_s) if isinstance(task, PrefillTask) else None


class Played:
    """An engine on a virtual device: what it decided for requests that are played to it."""

    def __init__(self, config: EngineConfig) -> None:
        self.choices: list[Choice] = []
        self.config = config
        self.device = device = VirtualDevice()
        self._is_idle = threading.Event()
        with (
            mock.patch("flowprefill.loading.make_device", lambda *args: device),
            mock.patch("flowprefill.engine.MonotonicClock", lambda: device.clock),
            mock.patch("flowprefill.engine_model.profile_model", device.profile_slowly),
        ):
            self.engine = device.engine = Engine(config, lambda output: None)
        self._decide = self.engine._scheduler.decide
        self.engine._scheduler.decide = self._note  # type: ignore[method-assign]

    def _note(self, now_s: float, events: Sequence[Event]) -> Decision:
        decision = self._decide(now_s, events)
        choice = choice_of(now_s, decision)
        if choice:
            self.choices.append(choice)
        else:
            self._is_idle.set()
        return decision

    def platform(self) -> ProfiledPlatform:
        """The same machine for the simulator."""
        model, profile = self.engine._model, self.device.profile
        assert profile is not None
        return ProfiledPlatform(
            "virtual",
            "tiny",
            DeviceTimes.from_profile(profile, model.spec.num_layers, model.program.limits),
            self.config.block_size,
            model.cache.num_blocks,
            MAX_TOKENS,
            scheduler_options(self.config, saturation_tokens=1),
        )

    def play(self, requests: Sequence[Request]) -> None:
        """Let them arrive, and run until nothing is left to do."""
        self.device.due = list(requests)
        while self.device.due:
            self._is_idle.clear()
            self.device.arrive()
            assert self._is_idle.wait(WAIT_S), "requests do not end"


class LoggedReplay(Replay):
    """A simulation that notes what is decided."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices: list[Choice] = []

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        super().on_decision(events, decision)
        choice = choice_of(self.now_s, decision)
        if choice:
            self.choices.append(choice)


def draw_requests(platform: ProfiledPlatform) -> tuple[list[TraceRequest], list[Objective]]:
    """Short and long prompts, more than can be on time, half of them with tight objectives."""
    draw = random.Random(0)
    lengths = [draw.choice((draw.randint(5, 60), draw.randint(200, 400))) for _ in range(60)]
    times = sorted(draw.uniform(0, 1) for _ in lengths)
    requests = [TraceRequest(t, "", n, 1) for t, n in zip(times, lengths, strict=True)]
    prefill_s = platform.cost(Granularity("tile")).prefill_s
    goals = [Objective("", draw.choice((1.5, 10.0)) * prefill_s(n), 1.0) for n in lengths]
    return at_load(requests, LOAD, platform), goals


@pytest.mark.parametrize("granularity", ["tile", "layer"])
@pytest.mark.parametrize("policy", ["goodput", "s-edf"])
def test_engine_and_simulator_decide_alike(tmp_path: Path, policy: str, granularity: str) -> None:
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path, max_len=MAX_TOKENS)),
        device="cpu",
        dtype="bfloat16",  # the tiny model's fp32 products are slow on some CPUs
        policy=policy,
        granularity=granularity,
        enable_prefix_caching=False,
        queue_timeout_ms=1e6,
        kv_cache_memory_bytes=kv_bytes(2 * MAX_TOKENS, num_layers=3),
    )
    played = Played(config)
    platform = played.platform()
    requests, goals = draw_requests(platform)
    played.play(
        [
            make_request(r.input_tokens, g.ttft_s, req_id=i, arrival_s=r.arrival_s, max_tokens=1)
            for i, (r, g) in enumerate(zip(requests, goals, strict=True))
        ]
    )
    setup = Setup(policy, Granularity.parse(granularity), error=0.0, platform=platform)
    simulated = LoggedReplay(requests, setup, objectives=goals).run_all()
    stats = played.engine.stats()
    played.engine.close()
    assert [c[1] for c in played.choices] == [c[1] for c in simulated.choices]
    for ours, theirs in zip(played.choices, simulated.choices, strict=True):
        assert ours == (pytest.approx(theirs[0]), theirs[1], pytest.approx(theirs[2]))
    assert stats.num_preemptions == simulated.scheduler.num_preemptions() > 10
    assert stats.num_evictions == simulated.counters.evictions > 0
