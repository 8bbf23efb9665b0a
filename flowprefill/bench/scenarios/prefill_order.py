"""Who gets the device first: short prompts behind long ones, high ranks behind low ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from flowprefill.bench.bars import Bar
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.rig import (
    GREEDY,
    Rig,
    reading,
    send_together,
    solo_ttft_s,
    ttft_s,
    wait_idle,
    wait_stats,
)
from flowprefill.metrics import percentile
from flowprefill.scheduler.ageing import PERIOD_S
from flowprefill_client import Client, Completion, Stream

HIGH: dict[str, Any] = {"slo_class": "high"}
LOW: dict[str, Any] = {"slo_class": "low"}
_MAX_GAP = 0.15
"""A long prefill may take so much longer than it would without the others' work."""
_NUM_SHORTS = 8
_SHORT_TOKENS = 64
_SHORT_MAX_TOKENS = 16
_HIGH_TOKENS = 16
_LONG: dict[str, Any] = {"ttft_slo_ms": 60_000.0}


# ---- row 1: short prompts behind long ones ------------------------------------------------------


@dataclass
class _Meeting:
    """Times of one group of requests over all rounds, seconds."""

    first_s: list[float] = field(default_factory=list)
    """TTFT of each request."""
    last_first_s: list[float] = field(default_factory=list)
    """Of each round, the TTFT of its last request."""
    end_s: list[float] = field(default_factory=list)
    """Of each round, from sending to the last token of all."""

    def add(self, answers: list[Completion]) -> None:
        first_s = [ttft_s(answer) for answer in answers]
        self.first_s += first_s
        self.last_first_s.append(max(first_s))
        self.end_s.append(max(answer.delta_times_s[-1] for answer in answers))


def shorts_behind_longs(rig: Rig) -> list[Bar]:
    """A prompt of 64 C, or three of them, and 8 prompts of 64 tokens two ticks later.

    Solo of a group is the same group without the other; the shorts' objective is twice theirs, that
    of the longs is a minute. The device has the work of both to do: so
    the long ones' bar counts from their own work and that of the short ones.
    """
    return [bar for num_longs in (1, 3) for bar in _meet(rig, num_longs)]


def _meet(rig: Rig, num_longs: int) -> list[Bar]:
    long_alone, short_alone, longs, shorts = (_Meeting() for _ in range(4))

    def long_prompts() -> list[str]:
        return [rig.prompt_of(64) for _ in range(num_longs)]

    def short_prompts() -> list[str]:
        return [rig.make_prompt(_SHORT_TOKENS) for _ in range(_NUM_SHORTS)]

    wait_idle(rig.client)
    with reading(send_together(rig.client, short_prompts(), _LONG, _SHORT_MAX_TOKENS)) as answers:
        objective = {"ttft_slo_ms": 2000 * max(map(ttft_s, answers()))}
    for _ in range(rig.rounds):
        prompts = (long_prompts(), short_prompts(), long_prompts(), short_prompts())
        wait_idle(rig.client)
        with reading(send_together(rig.client, prompts[0], _LONG)) as answers:
            long_alone.add(answers())
        with reading(
            send_together(rig.client, prompts[1], objective, _SHORT_MAX_TOKENS)
        ) as answers:
            short_alone.add(answers())
        wait_idle(rig.client)
        with reading(send_together(rig.client, prompts[2], _LONG)) as long_answers:
            time.sleep(2 * rig.tick_s)
            sent = send_together(rig.client, prompts[3], objective, _SHORT_MAX_TOKENS)
            with reading(sent) as answers:
                shorts.add(answers())
            longs.add(long_answers())
    name = "1 long" if num_longs == 1 else f"{num_longs} longs"
    work_s = median(long_alone.last_first_s) + median(short_alone.end_s)
    return [
        Bar(
            f"{name}: TTFT of 8 shorts, p95",
            percentile(shorts.first_s, 95),
            percentile(short_alone.first_s, 95) + 3 * rig.tick_s,
        ),
        Bar(
            f"{name}: its TTFT (the last one's)",
            median(longs.last_first_s),
            (1 + _MAX_GAP) * work_s,
        ),
        Bar(f"{name}: without the shorts", median(long_alone.last_first_s), None),
    ]


# ---- row 3: prompts back to back ----------------------------------------------------------------


def prompts_back_to_back(rig: Rig) -> list[Bar]:
    """Prompts of 4 C + C/8 and of 4 C: the rest of the first costs no more than its own rows."""
    together, apart = _Meeting(), []
    sizes = (4 + 1 / 8, 4)
    for _ in range(2 * rig.rounds):
        apart.append(sum(solo_ttft_s(rig, rig.client, rig.num_tokens(n), **LOW) for n in sizes))
        prompts = [rig.prompt_of(n) for n in sizes]
        wait_idle(rig.client)
        with reading(send_together(rig.client, prompts, LOW)) as answers:
            together.add(answers())
    return [Bar("both, until the last first token", median(together.last_first_s), median(apart))]


# ---- rows 4 and 5: a high rank behind low ones --------------------------------------------------


@dataclass
class _Probes:
    """Times of the high requests of one scenario, seconds."""

    max_tokens: int = 1
    ttft_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    """From the arrival at the server to the first slice."""
    largest_gap_s: list[float] = field(default_factory=list)
    """Of each request, between two of its tokens; none for a single one."""

    def send(self, client: Client, prompt: str, objectives: dict[str, Any]) -> None:
        answer = client.generate(
            prompt, max_tokens=self.max_tokens, sampling=GREEDY, return_timing=True, **objectives
        )
        gaps_s = [after - before for before, after in pairwise(answer.delta_times_s)]
        self.largest_gap_s += [max(gaps_s)] if gaps_s else []
        self.ttft_s.append(ttft_s(answer))
        assert answer.timing is not None
        self.queue_s.append(answer.timing["queue_s"])

    def bars(self, rig: Rig, solo_s: list[float]) -> list[Bar]:
        return [
            Bar("TTFT of the high one", median(self.ttft_s), median(solo_s) + 2 * rig.tick_s),
            Bar("its arrival to its first slice", median(self.queue_s), rig.tick_s),
            Bar("the same, worst", max(self.queue_s), None),
        ]


def high_beside_full_slots(rig: Rig) -> list[Bar]:
    """Four low streams take all of max_num_seqs=4, and one high request of 64 tokens comes, for 16.

    Its gaps are held against those it has beside three of them, who leave it a place.
    """
    probes, beside_three = _Probes(_HIGH_TOKENS), _Probes(_HIGH_TOKENS)
    with rig.model("slots", max_num_seqs=4) as client:
        solo_s = [solo_ttft_s(rig, client, 64, **HIGH) for _ in range(2 * rig.rounds)]
        streams, endless = list[Stream](), rig.max_model_len - 64
        with contextlib.ExitStack() as stack:
            for num_streams, sent in ((3, beside_three), (4, probes)):
                while len(streams) < num_streams:
                    low = client.stream(
                        rig.make_prompt(64), max_tokens=endless, sampling=GREEDY, **LOW
                    )
                    streams.append(stack.enter_context(low))
                wait_stats(client, lambda stats: stats["num_decoding"] == len(streams))
                for _ in range(2 * rig.rounds):
                    sent.send(client, rig.make_prompt(64), HIGH)
            if client.engine_stats()["num_decoding"] != 4:
                raise BenchmarkError("the streams ended before the measurement did")
    limit_s = median(beside_three.largest_gap_s) + 2 * rig.tick_s
    gaps = Bar("its largest gap, median", median(probes.largest_gap_s), limit_s)
    return [*probes.bars(rig, solo_s), gaps]


def high_behind_thirty_low(rig: Rig) -> list[Bar]:
    """30 low requests of 8 C, and at three ticks one of 2 C, high; then the same as an equal."""
    solo_s, high, equal = [], _Probes(), _Probes()
    for _ in range(rig.rounds):
        solo_s.append(solo_ttft_s(rig, rig.client, rig.num_tokens(2), **HIGH))
        _send_behind_thirty(rig, high, HIGH)
        _send_behind_thirty(rig, equal, LOW)
    control = Bar("TTFT of an equal one, control", median(equal.ttft_s), None)
    return [*high.bars(rig, solo_s), control]


def _send_behind_thirty(rig: Rig, probes: _Probes, objectives: dict[str, Any]) -> None:
    prompts, prompt = [rig.prompt_of(8) for _ in range(30)], rig.prompt_of(2)
    wait_idle(rig.client)
    with reading(send_together(rig.client, prompts, LOW)) as answers:
        time.sleep(3 * rig.tick_s)
        probes.send(rig.client, prompt, objectives)
        answers()


# ---- row 6: a low rank beside a full load of high ones ------------------------------------------

_NUM_CLIENTS = 16
_LOW_SLO_MS = 1000.0
_LASTS_S = 30.0


def low_beside_full_load(rig: Rig) -> list[Bar]:
    """16 clients keep the device busy with high requests of 4 C, and a low one of 16 C comes.

    It is late after 1 s, and gets its first slice at most 2 x PERIOD_S later. The high ones are
    measured for half a minute from then on, and for a quarter before and behind it.
    """
    wait_idle(rig.client)
    low: dict[str, Any] = {**LOW, "ttft_slo_ms": _LOW_SLO_MS, "return_timing": True}
    with _full_load(rig) as ttfts_s:
        time.sleep(_LASTS_S / 2)
        start = len(ttfts_s)
        sent_s = time.monotonic()
        answer = rig.client.generate(rig.prompt_of(16), max_tokens=1, sampling=GREEDY, **low)
        time.sleep(max(0.0, sent_s + _LASTS_S - time.monotonic()))
        end = len(ttfts_s)
        time.sleep(_LASTS_S / 2)
    with_s, without_s = ttfts_s[start:end], [*ttfts_s[:start], *ttfts_s[end:]]
    assert answer.timing is not None
    bound_s = _LOW_SLO_MS / 1000 + 2 * PERIOD_S
    return [
        Bar("the low one's wait for its first slice", answer.timing["queue_s"], bound_s),
        Bar("TTFT of high ones, p95", percentile(with_s, 95), 1.1 * percentile(without_s, 95)),
        Bar("without the low one", percentile(without_s, 95), None),
    ]


@contextlib.contextmanager
def _full_load(rig: Rig) -> Iterator[list[float]]:
    """High requests without a pause until the end of the block. Yields their TTFTs as they come."""
    stopping, ttfts_s = threading.Event(), list[float]()
    prompts = [rig.prompt_of(4) for _ in range(64)]

    def run_client(first: int) -> None:
        index = first
        while not stopping.is_set():
            # Its own first word, or the prefix cache would do the work.
            prompt = f"{index} {prompts[index % len(prompts)]}"
            answer = rig.client.generate(prompt, max_tokens=1, sampling=GREEDY, **HIGH)
            ttfts_s.append(ttft_s(answer))
            index += _NUM_CLIENTS

    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        clients = [pool.submit(run_client, i) for i in range(_NUM_CLIENTS)]
        try:
            yield ttfts_s
        finally:
            stopping.set()
    for client in clients:
        client.result()


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("short-behind-long", 1, "vllm-project/vllm#21495", shorts_behind_longs),
    Scenario("back-to-back", 3, "sgl-project/sglang#22984", prompts_back_to_back),
    Scenario("slots-full", 4, "vllm-project/vllm#40004", high_beside_full_slots),
    Scenario("thirty-low", 5, "vllm-project/vllm#24365", high_behind_thirty_low),
    Scenario("low-rank", 6, "vllm-project/vllm#20608", low_beside_full_load),
)
