"""`flowprefill bench blocking`: how long an urgent prompt waits for the device it should have.

In-process, without server and network. While a long prompt is prefilled, short urgent ones arrive
at random moments, each after the one before has its token. The engine measures the blocking time:
from the arrival in its inbox to the device start of the newcomer's first slice.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile
from flowprefill.request import SLO, FinishReason, Request, TokenOutput
from flowprefill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from flowprefill.engine import Engine

MEAN_GAP_S = 0.08
"""Mean pause between two short prompts; exponential, so every moment is equally likely."""
SHORT_SLO = SLO(ttft_s=60.0, tbt_s=1.0)
"""Always feasible, however long it is blocked: work that is late anyway preempts nothing."""
LONG_SLO = SLO(ttft_s=3600.0, tbt_s=1.0)
_WAIT_S = 600.0
_MAX_FRUITLESS = 10


def run(
    preemptions: Annotated[
        int, typer.Option(min=1, max=2000, help="Short prompts that meet a long one.")
    ] = 300,
    long_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the long prompt.")] = 7500,
    short_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the short prompts.")] = 16,
    granularity: Annotated[
        list[str] | None,
        typer.Option(help="whole, chunk:N, layer, op or tile; may be repeated. Default: tile."),
    ] = None,
    model_json: Annotated[
        Path | None, typer.Option(help="Engine configuration; default: that of smollm2.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and moments.")] = 0,
    json_out: Annotated[Path | None, typer.Option(help="Write the JSON line here too.")] = None,
) -> None:
    """Measure blocking times at random moments of a long prefill."""
    from rich.console import Console
    from rich.table import Table

    config = load_model_json(model_json)
    results: dict[str, Any] = {}
    table = Table(title=f"Blocking time in ms during a prefill of {long_tokens} tokens")
    table.add_column("granularity")
    for heading in ("p50", "p99", "max", "preemptions"):
        table.add_column(heading, justify="right")
    for name in granularity or ["tile"]:
        Granularity.parse(name)  # a typing error ends the run before its first minute
    for name in granularity or ["tile"]:
        one = dataclasses.replace(config, granularity=name, policy="s-edf")
        result = summarise(*measure(one, preemptions, long_tokens, short_tokens, seed))
        results[name] = {str(long_tokens): result}
        times = (f"{result[key]:.2f}" for key in ("p50_ms", "p99_ms", "max_ms"))
        table.add_row(name, *times, str(result["preemptions"]))
    Console().print(table)
    print_json({**results, "run": describe_run(config, seed)}, json_out)


def measure(
    config: EngineConfig, num_shorts: int, long_tokens: int, short_tokens: int, seed: int
) -> tuple[list[float], int]:
    """Returns the blocking time of each short prompt, seconds, and the number of preemptions."""
    from rich.console import Console
    from rich.progress import Progress

    from flowprefill.engine import Engine

    probe = _Probe(random.Random(seed))
    console = Console(stderr=True)
    with Progress(console=console, refresh_per_second=2) as progress:
        task = progress.add_task(f"{config.granularity}: loading", total=num_shorts)
        probe.engine = Engine(config, probe.on_output)
        try:
            # What only the first request pays for.
            probe.wait_for(probe.submit(short_tokens, SHORT_SLO))
            progress.update(task, description=config.granularity)
            preemptions_before = probe.engine.stats().num_preemptions
            blocking_s: list[float] = []
            num_fruitless = 0
            while len(blocking_s) < num_shorts:
                new = probe.interrupt(long_tokens, short_tokens, num_shorts - len(blocking_s))
                num_fruitless = 0 if new else num_fruitless + 1
                if num_fruitless == _MAX_FRUITLESS:
                    raise BenchmarkError(
                        f"granularity {config.granularity}: nothing was preempted in "
                        f"{num_fruitless} prefills of {long_tokens} tokens"
                    )
                blocking_s += new
                progress.update(task, completed=len(blocking_s))
            return blocking_s, probe.engine.stats().num_preemptions - preemptions_before
        finally:
            probe.engine.close()


class _Probe:
    """Sends prompts of random token ids to an engine and waits for their ends."""

    engine: Engine

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._req_ids = itertools.count(1)
        self._ended: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()

    def on_output(self, output: TokenOutput) -> None:
        """Called on the engine thread."""
        if output.finish_reason is not None:
            self._ended.put(output)

    def interrupt(self, long_tokens: int, short_tokens: int, max_shorts: int) -> list[float]:
        """Prefill one long prompt and send short ones into it; returns their blocking times, s."""
        long_id = self.submit(long_tokens, LONG_SLO)
        blocking_s: list[float] = []
        while len(blocking_s) < max_shorts:
            if self.wait_end(self._rng.expovariate(1 / MEAN_GAP_S)) == long_id:
                return blocking_s
            num_before = len(self.engine.stats().blocking_s)
            ended = self.wait_for(self.submit(short_tokens, SHORT_SLO))
            # The first preemption since then is that by the short prompt.
            blocking_s += self.engine.stats().blocking_s[num_before:][:1]
            if long_id in ended:
                return blocking_s
        self.engine.cancel(long_id)
        self.wait_for(long_id)
        return blocking_s

    def submit(self, num_tokens: int, slo: SLO) -> int:
        """Send a prompt of random token ids; returns its req_id."""
        vocab_size = self.engine.info.vocab_size
        request = Request(
            req_id=next(self._req_ids),
            prompt_token_ids=[self._rng.randrange(vocab_size) for _ in range(num_tokens)],
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            slo=slo,
            arrival_s=time.monotonic(),
        )
        self.engine.submit(request)
        return request.req_id

    def wait_for(self, req_id: int) -> set[int]:
        """Wait until `req_id` has ended; returns the ids of all that ended meanwhile."""
        ended: set[int] = set()
        while req_id not in ended:
            other = self.wait_end(_WAIT_S)
            if other is None:
                raise BenchmarkError(f"no answer within {_WAIT_S:.0f} s")
            ended.add(other)
        return ended

    def wait_end(self, timeout_s: float) -> int | None:
        """The req_id of the next request that ends, or None after the time."""
        try:
            output = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if output.finish_reason is FinishReason.ERROR:
            raise BenchmarkError(f"the engine failed a request: {output.error_message}")
        return output.req_id


def summarise(blocking_s: list[float], preemptions: int) -> dict[str, Any]:
    """The figures of one granularity, as they are in the JSON line."""
    times_ms = [s * 1000 for s in blocking_s]
    return {
        "p50_ms": round(percentile(times_ms, 50), 3),
        "p99_ms": round(percentile(times_ms, 99), 3),
        "max_ms": round(max(times_ms), 3),
        "num_shorts": len(times_ms),
        "preemptions": preemptions,
    }
