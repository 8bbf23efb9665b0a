"""One soak: the server, its clients, the kills, the samples, and what is left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from flowprefill.bench.metrics_page import MetricsPage
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.prompts import prompt_maker
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.soak.asking import MODEL_NAME, Asker
from flowprefill.bench.soak.record import Record
from flowprefill.bench.soak.rig import small_cache, soak_server
from flowprefill.bench.soak.traffic import Traffic
from flowprefill.bench.soak.watch import Watch
from flowprefill.config import EngineConfig
from flowprefill_client import AsyncClient, ServerError

KILLS = (0.05, 0.12)
"""When the engine is killed, as shares of the time: the last one lives long enough to be judged."""
NUM_CLIENTS = 5
_END_BEYOND_QUEUE_S = 30.0
_SETTLE_S = 20.0
_RESTART_S = 60.0
_BUSY = ("num_waiting", "num_prefilling", "num_decoding", "num_kv_blocks_used", "pass_bytes")


@dataclass
class Rest:
    """What the engine and the metrics page say when nobody sends any more."""

    busy: dict[str, float]
    """What should be 0, and is not."""
    num_lost: float = 0.0
    """Requests started and neither ended nor live."""
    num_cancelled: float = 0.0
    num_evictions: float = 0.0
    num_preemptions: float = 0.0

    @classmethod
    def of(cls, page: MetricsPage, stats: Mapping[str, Any]) -> Rest:
        """Raises KeyError if either lacks what must be there."""
        found = {name: float(stats[name]) for name in _BUSY} | page.gauges()
        return cls(
            {name: value for name, value in found.items() if value},
            page.num_lost(),
            page.requests("cancelled"),
            page.value("flowprefill_evictions_total"),
            page.value("flowprefill_preemptions_total"),
        )


@dataclass
class Soak:
    """All that was found out."""

    record: Record
    watch: Watch
    unready_s: list[float]
    """From each kill until the metrics page said that there is no engine."""
    restarts_s: list[float]
    """From each kill until the next engine answered."""
    rest: Rest
    stop_problems: list[str] = field(default_factory=list)
    """What the server's stop cut short or left behind."""


async def measure(config: EngineConfig, minutes: float, seed: int) -> Soak:
    """Start the server, send, kill, look; shows progress on standard error."""
    with bench_progress(round(60 * minutes)) as progress:
        progress.describe("starting tritonserver")
        # The server's start and end block: nothing else runs then.
        with soak_server(small_cache(config)) as server:
            connector = aiohttp.TCPConnector(force_close=True)
            timeout = aiohttp.ClientTimeout(total=None)  # the soak has its own
            async with (
                AsyncClient(server.server.grpc_url, MODEL_NAME) as client,
                aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            ):
                traffic = Traffic(
                    Asker(server, client, session),
                    prompt_maker(config, seed),
                    [slo_class.name for slo_class in config.slo_classes],
                    config.queue_timeout_ms / 1000 + _END_BEYOND_QUEUE_S,
                    seed,
                )
                soak = await _Run(traffic, minutes, progress).run()
        soak.stop_problems = server.stop_problems
        return soak


class _Run:
    """One soak."""

    def __init__(self, traffic: Traffic, minutes: float, progress: BenchProgress) -> None:
        self._traffic = traffic
        self._asker = traffic.asker
        self._total_s = 60 * minutes
        self._progress = progress
        self._watch = Watch()
        self._unready_s: list[float] = []
        self._restarts_s: list[float] = []

    async def run(self) -> Soak:
        self._progress.describe("the controls' first answers")
        await self._traffic.learn_controls()
        done = asyncio.Event()
        clients = [
            asyncio.ensure_future(self._traffic.run_client(index, done))
            for index in range(NUM_CLIENTS)
        ]
        await asyncio.gather(self._look(done), self._kill_engines())
        self._progress.describe("the last answers")
        await asyncio.gather(*clients)
        await self._traffic.check_controls()
        rest = await self._at_rest()
        return Soak(self._traffic.record, self._watch, self._unready_s, self._restarts_s, rest)

    async def _look(self, done: asyncio.Event) -> None:
        """Sample memory until the time is up, then set `done`."""
        begin_s = time.monotonic()
        step_s = min(5.0, self._total_s / 60)
        while (passed_s := time.monotonic() - begin_s) < self._total_s:
            self._progress.describe("traffic")
            self._progress.advance_to(passed_s)
            await asyncio.to_thread(self._watch.sample, self._asker.server)
            await asyncio.sleep(step_s)
        done.set()

    async def _kill_engines(self) -> None:
        begin_s = time.monotonic()
        for share in KILLS:
            await asyncio.sleep(max(0.0, begin_s + share * self._total_s - time.monotonic()))
            try:
                await self._kill_engine()
            except (BenchmarkError, ProcessLookupError) as error:
                self._traffic.record.num_without_engine += 1
                self._traffic.record.note(f"kill: {error}")

    async def _kill_engine(self) -> None:
        """Raises BenchmarkError if there is none, or none after it."""
        pid = await asyncio.to_thread(self._asker.server.engine_pid)
        kill_s = time.monotonic()
        self._traffic.record.kill_times_s.append(kill_s)
        os.kill(pid, signal.SIGKILL)
        await self._wait(self._is_seen_dead, _RESTART_S, "the kill on the metrics page")
        self._unready_s.append(time.monotonic() - kill_s)
        await self._wait(self._has_other_engine(pid), _RESTART_S, "a new engine")
        self._restarts_s.append(time.monotonic() - kill_s)

    async def _is_seen_dead(self) -> bool:
        page = await asyncio.to_thread(self._asker.server.metrics)
        return page.value("flowprefill_engine_ready") == 0

    def _has_other_engine(self, pid: int) -> Callable[[], Any]:
        async def ask() -> bool:
            await self._asker.client.engine_stats()
            return await asyncio.to_thread(self._asker.server.engine_pid) != pid

        return ask

    async def _at_rest(self) -> Rest:
        """Wait until it is, for some seconds, and tell how it is then."""
        page: MetricsPage | None = None
        rest = Rest({"no answer": 1.0})

        async def look() -> bool:
            nonlocal page, rest
            before, page = page, await asyncio.to_thread(self._asker.server.metrics)
            rest = Rest.of(page, await self._asker.client.engine_stats())
            return not rest.busy and before is not None and page.values == before.values

        with contextlib.suppress(BenchmarkError):
            await self._wait(look, _SETTLE_S, "rest")
        return rest

    async def _wait(self, condition: Callable[[], Any], limit_s: float, what: str) -> None:
        """Until it is true; whoever does not answer is asked again."""
        deadline_s = time.monotonic() + limit_s
        is_true = False
        while not is_true:
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{what}: not within {limit_s:g} s")
            await asyncio.sleep(0.1)
            with contextlib.suppress(ServerError, BenchmarkError, OSError, KeyError):
                is_true = await condition()
