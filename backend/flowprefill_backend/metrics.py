"""Metrics: one thread that brings a model's counts and its engine's to the metrics page.

Requests are counted here in the stub, where each has its one end, whatever became of the engine.
The engine counts decisions, preemptions and the like since its own start; from one engine to the
next, counters go on. What the page shows is noted series by series, and observations that it lacks
are kept, so a call that the server did not take is made up for by the next update.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from flowprefill.engine_process import EngineState
from flowprefill.errors import UnavailableError
from flowprefill.stats import EngineInfo, EngineStats
from flowprefill_backend.metric_families import (
    BLOCKS_FAMILY,
    ENDED,
    JUDGED,
    LIVE,
    ON_TIME,
    RATIO,
    STARTED,
)
from flowprefill_backend.metrics_page import MetricsPage
from flowprefill_backend.request_counts import Series, Tally

INTERVAL_S = 1.0
"""Between two updates of the page."""
REFRESH_UPDATES = 10
"""So many updates apart all gauges are sent again: another instance of the model, which is being
unloaded, may have set them."""
MAX_UNOBSERVED = 100_000
"""So many observations that the server did not take are kept, the latest."""

ENGINE_COUNTERS = {
    "flowprefill_preemptions_total": "num_preemptions",
    "flowprefill_evictions_total": "num_evictions",
    "flowprefill_decisions_total": "num_decisions",
    "flowprefill_decision_seconds_total": "decision_seconds_total",
    "flowprefill_slices_total": "num_slices",
    "flowprefill_cached_prompt_tokens_total": "num_cached_tokens",
}
"""Families whose values are fields of EngineStats."""
_RESTARTS = ("flowprefill_engine_restarts_total",)
_ADDS_UP = (STARTED, *ENDED, LIVE)


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
        is_replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        """num_unparsed: live requests that the engine does not have yet. is_replaced: the gauges
        are those of another instance of the model now."""
        self._page = page
        self._tally = tally
        self._engine = engine
        self._info = info
        self._num_unparsed = num_unparsed
        self._on_error = on_error
        self._is_replaced = is_replaced
        self._totals: defaultdict[Series, float] = defaultdict(float)
        self._published: defaultdict[Series, float] = defaultdict(float)
        cache = (str(info.block_size), str(info.num_kv_blocks))
        self._cache_info = ("vllm:cache_config_info", *cache)
        self._totals[self._cache_info] = 1
        self._unobserved: list[tuple[Series, float]] = []
        self._last_stats = EngineStats()
        self._heard: EngineStats | None = None
        """What the engine that runs said last; None if none does, or it said nothing yet."""
        self._last_state: tuple[EngineState, int] | None = None
        self._is_behind = True
        """Something runs, or the page does not show all."""
        self._has_failed = False
        self._closing = threading.Event()
        self._do(page.increment, 0, LIVE)
        self._try(self.update)  # so that a ready model has its gauges
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Bring the last counts to the page and its gauges to 0, in twice `timeout_s` at most."""
        self._closing.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            end = threading.Thread(
                target=self._try, args=(self._end,), name="metrics-end", daemon=True
            )
            end.start()
            end.join(timeout_s)
        self._tally.close()

    def update(self) -> None:
        """Bring the page up to date. With nothing live and nothing new the engine is not asked."""
        counts, observations = self._tally.take()
        self._unobserved += observations
        state = (self._engine.state, self._engine.num_restarts)
        is_new = bool(counts or observations or state != self._last_state)
        if not (is_new or self._is_behind):
            return
        self._is_behind = True  # until all of this is done
        for series, count in counts.items():
            self._totals[series] += count
        stats = self._ask_engine()
        if stats is not None or state != self._last_state:
            self._heard = stats
        gauges = self._gauges(self._presumed() if stats is None else stats)
        self._count_engine(stats, state)
        is_done = self._publish_observations()
        is_done &= self._publish_counts()
        is_done &= self._is_replaced() or self._publish_gauges(gauges)
        is_at_rest = state[0] is not EngineState.READY if stats is None else _is_at_rest(stats)
        self._is_behind = not (is_done and is_at_rest) or self._num_live > 0

    def _run(self) -> None:
        for number in itertools.count(1):
            if self._closing.wait(INTERVAL_S):
                return
            self._try(self.update)
            if number % REFRESH_UPDATES == 0 and not self._is_replaced():
                self._do(self._page.refresh)

    def _end(self) -> None:
        """The last update: nothing runs any more."""
        self.update()
        self._totals[self._cache_info] = 0
        self._publish_counts(num_live=0)
        if not self._is_replaced():
            self._publish_gauges((0, series) for _, series in self._gauges(None))

    def _try(self, part: Callable[[], None]) -> None:
        """The threads' edge."""
        try:
            part()
        except Exception as error:
            self._tell(error)

    def _do(self, call: Callable[..., None], *args: float | str) -> bool:
        """Whether the server took a call; one that fails does not keep it from the others."""
        try:
            call(*args)
        except Exception as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: Exception) -> None:
        """Once, as it may go on for ever."""
        if not self._has_failed:
            self._on_error(error)
        self._has_failed = True

    def _ask_engine(self) -> EngineStats | None:
        try:
            return self._engine.stats()
        except UnavailableError:  # it is dead, restarts, or does not answer in time
            return None

    def _presumed(self) -> EngineStats | None:
        """For an engine that does not answer: it has what it had, and whatever came since waits."""
        last = self._heard
        if last is None:
            return None
        num_begun = last.num_prefilling + last.num_decoding
        num_in_engine = self._num_live - self._num_unparsed()
        num_waiting = max(last.num_waiting, num_in_engine - num_begun)
        return dataclasses.replace(last, num_waiting=num_waiting)

    @property
    def _num_live(self) -> int:
        """By what is counted, so that the page adds up."""
        ended = sum(total for (name, *_), total in self._totals.items() if name in ENDED)
        return int(self._totals[(STARTED,)] - ended)

    def _count_engine(self, stats: EngineStats | None, state: tuple[EngineState, int]) -> None:
        if stats is not None:
            before = self._last_stats
            if before.since_s != stats.since_s:  # another engine, which counts from 0
                before = EngineStats()
            for name, field in ENGINE_COUNTERS.items():
                self._totals[(name,)] += max(0, getattr(stats, field) - getattr(before, field))
            self._last_stats = stats
        self._totals[_RESTARTS] = state[1]
        self._last_state = state

    def _publish_observations(self) -> bool:
        """Keep what the server does not take. Returns whether that is nothing."""
        missed = [
            (series, value)
            for series, value in self._unobserved
            if not self._do(self._page.observe, value, *series)
        ]
        self._unobserved = missed[-MAX_UNOBSERVED:]
        return not missed

    def _publish_counts(self, num_live: int | None = None) -> bool:
        """Add what the page lacks. Returns whether the server took all of it.

        Of what other instances of the model have too, each adds its own and takes it away.
        """
        self._totals[(LIVE,)] = self._num_live if num_live is None else num_live
        new = {
            series: total - self._published[series]
            for series, total in self._totals.items()
            if total != self._published[series]
        }
        is_done = True
        # What adds up comes last and together: hardly any page is fetched in between.
        for series in sorted(new, key=lambda series: series[0] in _ADDS_UP):
            if self._do(self._page.increment, new[series], *series):
                self._published[series] = self._totals[series]
            else:
                is_done = False
        return is_done

    def _publish_gauges(self, gauges: Iterator[tuple[float, Series]]) -> bool:
        """Returns whether the server took all of them."""
        ratios = [
            (self._totals[(ON_TIME, series[1])] / judged, (RATIO, series[1]))
            for series, judged in list(self._totals.items())
            if series[0] == JUDGED and judged
        ]
        return all([self._do(self._page.set, value, *s) for value, s in (*ratios, *gauges)])

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
        if not self._page.shows(BLOCKS_FAMILY):
            return
        blocks = {
            "used": used,
            "free": num_blocks - used,
            "max": num_blocks,
            "tokens_per": self._info.block_size,
            "fraction": used / num_blocks,
        }
        for kind, value in blocks.items():
            yield value, (BLOCKS_FAMILY, kind)


def _is_at_rest(stats: EngineStats) -> bool:
    return not (
        stats.num_waiting
        or stats.num_prefilling
        or stats.num_decoding
        or stats.num_kv_blocks_used
        or stats.pass_bytes
    )
