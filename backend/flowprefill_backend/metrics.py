"""Metrics: one thread that brings a model's counts and its engine's to the metrics page.

Requests are counted here in the stub, where each has its one end, whatever became of the engine.
The engine counts decisions, preemptions and the like since its own start; from one engine to the
next, counters go on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from flowprefill.engine_process import EngineState
from flowprefill.errors import UnavailableError
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill_backend.metric_families import ENDED, JUDGED, ON_TIME, STARTED
from flowprefill_backend.metrics_page import MetricsPage
from flowprefill_backend.request_counts import Series, Tally

INTERVAL_S = 1.0
"""Between two updates of the page."""

ENGINE_COUNTERS = {
    "flowprefill_preemptions_total": "num_preemptions",
    "flowprefill_evictions_total": "num_evictions",
    "flowprefill_decisions_total": "num_decisions",
    "flowprefill_decision_seconds_total": "decision_seconds_total",
    "flowprefill_slices_total": "num_slices",
    "flowprefill_cached_prompt_tokens_total": "num_cached_tokens",
}
"""Families whose values are fields of EngineStats."""


class EngineLike(Protocol):
    """What is used of EngineClient."""

    def stats(self) -> EngineStats: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def num_restarts(self) -> int: ...


class Metrics:
    """Updates a page until it is closed; sleeps through while nothing happens."""

    def __init__(
        self,
        page: MetricsPage,
        tally: Tally,
        engine: EngineLike,
        info: EngineInfo,
        num_unparsed: Callable[[], int],
        on_error: Callable[[Exception], None],
    ) -> None:
        """num_unparsed: live requests that the engine does not have yet."""
        self._page = page
        self._tally = tally
        self._engine = engine
        self._info = info
        self._num_unparsed = num_unparsed
        self._on_error = on_error
        self._totals: Counter[Series] = Counter()
        self._last_stats = EngineStats()
        self._last_state: tuple[EngineState, int] | None = None
        self._was_busy = True
        self._has_failed = False
        self._closing = threading.Event()
        self._try_to_update()  # so that a ready model has its gauges
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._tally.close()
        self._closing.set()
        self._thread.join(timeout_s)

    def update(self) -> None:
        """Bring the page up to date. With nothing live and nothing new the engine is not asked."""
        counts, observations = self._tally.take()
        state = (self._engine.state, self._engine.num_restarts)
        is_new = bool(counts or observations or state != self._last_state)
        if not (is_new or self._was_busy):
            return
        stats = self._ask_engine()
        self._publish_requests(counts, observations)
        self._publish_engine(stats, state)
        self._was_busy = self._num_live > 0 or not (stats is None or _is_at_rest(stats))

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._try_to_update()

    def _try_to_update(self) -> None:
        try:
            self.update()
        except Exception as error:  # the thread's edge; told once, as it may go on for ever
            if not self._has_failed:
                self._on_error(error)
            self._has_failed = True

    def _ask_engine(self) -> EngineStats | None:
        try:
            return self._engine.stats()
        except UnavailableError:  # it is dead, or restarts
            return None

    @property
    def _num_live(self) -> int:
        """By what the page shows, so that it adds up."""
        ended = sum(total for (name, *_), total in self._totals.items() if name in ENDED)
        return self._totals[(STARTED,)] - ended

    def _publish_requests(
        self, counts: Counter[Series], observations: list[tuple[Series, float]]
    ) -> None:
        self._totals.update(counts)
        for series, value in observations:
            self._page.observe(value, *series)
        # What adds up comes last and together: hardly any page is fetched in between.
        for series in sorted(counts, key=lambda series: series[0] in (STARTED, *ENDED)):
            if counts[series]:
                self._page.increment(counts[series], *series)
        self._page.set(self._num_live, "flowprefill_requests_live")
        for series, judged in self._totals.items():
            if series[0] == JUDGED:
                ratio = self._totals[(ON_TIME, series[1])] / judged
                self._page.set(ratio, "flowprefill_slo_attainment_ratio", series[1])

    def _publish_engine(self, stats: EngineStats | None, state: tuple[EngineState, int]) -> None:
        if stats is not None:
            before = self._last_stats
            if before.since_s != stats.since_s:  # another engine, which counts from 0
                before = EngineStats()
            for name, field in ENGINE_COUNTERS.items():
                by = getattr(stats, field) - getattr(before, field)
                if by > 0:
                    self._page.increment(by, name)
            self._last_stats = stats
        num_restarts = self._last_state[1] if self._last_state else 0
        if state[1] > num_restarts:
            self._page.increment(state[1] - num_restarts, "flowprefill_engine_restarts_total")
        self._last_state = state
        for value, series in self._gauges(stats):
            self._page.set(value, *series)

    def _gauges(self, stats: EngineStats | None) -> Iterator[tuple[float, Series]]:
        """Without an engine nothing runs, and what is live waits for it."""
        used, num_blocks = 0, self._info.num_kv_blocks
        num_waiting, num_running, num_bytes = self._num_live, 0, 0
        if stats is not None:
            num_waiting = stats.num_waiting + self._num_unparsed()
            num_running = stats.num_prefilling + stats.num_decoding
            used, num_bytes = stats.num_kv_blocks_used, stats.pass_bytes
        yield num_waiting, ("vllm:num_requests_waiting",)
        yield num_running, ("vllm:num_requests_running",)
        yield used / num_blocks, ("vllm:kv_cache_usage_perc",)
        yield num_bytes, ("flowprefill_parked_bytes",)
        yield int(self._engine.state is EngineState.READY), ("flowprefill_engine_ready",)
        blocks = {
            "used": used,
            "free": num_blocks - used,
            "max": num_blocks,
            "tokens_per": self._info.block_size,
            "fraction": used / num_blocks,
        }
        for kind, value in blocks.items():
            yield value, ("nv_trt_llm_kv_cache_block_metrics", kind)
        yield 1, ("vllm:cache_config_info", str(self._info.block_size), str(num_blocks))


def _is_at_rest(stats: EngineStats) -> bool:
    return not (
        stats.num_waiting
        or stats.num_prefilling
        or stats.num_decoding
        or stats.num_kv_blocks_used
        or stats.pass_bytes
    )
