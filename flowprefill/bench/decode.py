"""`flowprefill bench decode`: tokens per second of several streams that decode together.

In-process, without server: an engine with so many requests and nothing else to do, so scheduler,
program and sampler take part as they do in service. Counted are the steps in which every stream is
decoding: behind the last first token, up to the first end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import (
    Dtype,
    JsonOut,
    ModelJson,
    PeerOptions,
    PeersFile,
    Seed,
    load_config,
)
from flowprefill.bench.peers.spec import Conditions, PeerSpec, read_peers
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, print_json
from flowprefill.metrics import percentile
from flowprefill.request import SLO

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.session import Session
    from flowprefill.config import EngineConfig

BATCHES = (1, 2, 4, 8, 16)
PATIENT = SLO(ttft_s=600.0, tbt_s=60.0)
"""Nobody's next token is due while another one's prompt is prefilled, so all start together."""
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Lengths:
    """Tokens of a stream."""

    context: int
    """Of its prompt."""
    tokens: int
    """That it gives."""


@dataclass
class Measured:
    """All rounds."""

    step_s: dict[int, list[float]]
    """Seconds of each step in which all streams decoded, by their number."""
    peers_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per token of each peer, alone, in each round."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of model and peers, for the JSON line."""


def run(
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Streams; may be repeated. Default: {BATCHES}."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a stream's prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that a stream gives.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each number is measured.")] = 5,
    peer: PeerOptions = None,
    peers_file: PeersFile = None,
    dtype: Dtype = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure steady decoding, alone and of several streams together."""
    from rich.console import Console

    config = load_config(model_json, dtype)
    peers = read_peers(peer, peers_file, config)
    lengths = Lengths(context, tokens)
    measured = measure(config, sorted(set(batch or BATCHES)), lengths, peers, rounds, seed)
    result = summarise(measured)
    Console().print(make_table(result, lengths))
    facts = {"rounds": rounds, **dataclasses.asdict(lengths), **describe_run(config, seed)}
    print_json({**result, "run": {**facts, **measured.facts}}, json_out)


def measure(
    config: EngineConfig,
    batches: Sequence[int],
    lengths: Lengths,
    peers: Sequence[PeerSpec],
    rounds: int,
    seed: int,
) -> Measured:
    """All numbers of streams in each round, and the peers; shows progress on standard error."""
    from flowprefill.bench.peers.process import describe_peers, start_peers
    from flowprefill.bench.session import Session

    config = dataclasses.replace(config, max_num_seqs=max(*batches, config.max_num_seqs))
    measured = Measured({batch: [] for batch in batches}, {peer.name: [] for peer in peers})
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bench_progress(rounds * (len(batches) + len(peers))))
        session = stack.enter_context(Session(config, seed, progress.show_loading))
        info = session.engine.info
        conditions = Conditions.of(config, info.vocab_size, info.dtype, info.max_model_len)
        progress.describe("starting peers")
        running = stack.enter_context(start_peers(peers, conditions))
        progress.describe("warm-up")
        decode_streams(session, max(batches), Lengths(lengths.context, _WARM_UP_TOKENS))
        for one in running:
            one.decode_s(lengths.context, _WARM_UP_TOKENS, seed)
        for index in range(rounds):
            for batch in batches if index % 2 == 0 else reversed(batches):
                with progress.step(f"{batch} streams"):
                    tokens_of = decode_streams(session, batch, lengths)
                    measured.step_s[batch] += steady_steps(tokens_of)
            for one in running:
                with progress.step(one.name):
                    seconds = one.decode_s(lengths.context, lengths.tokens, seed + 1 + index)
                    measured.peers_s[one.name].append(seconds / lengths.tokens)
        measured.facts = {"kernels": info.kernels, **describe_peers(conditions, running)}
    return measured


def decode_streams(session: Session, batch: int, lengths: Lengths) -> list[list[float]]:
    """When each token of each of `batch` streams was there."""
    answers = [
        session.submit(session.random_prompt(lengths.context), PATIENT, lengths.tokens)
        for _ in range(batch)
    ]
    return [session.wait_end(answer).token_s for answer in answers]


def steady_steps(token_s: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the steps in which all streams took part.

    token_s: times of each stream's tokens; those of one step share a time
    Raises BenchmarkError if there was no such step.
    """
    start_s, end_s = max(times[0] for times in token_s), min(times[-1] for times in token_s)
    shared = set.intersection(*(set(times) for times in token_s))
    steps = sorted(time_s for time_s in shared if start_s < time_s <= end_s)
    if len(steps) < 2:
        raise BenchmarkError("the streams hardly decoded together: give them more tokens")
    return [after - before for before, after in itertools.pairwise(steps)]


def summarise(measured: Measured) -> dict[str, Any]:
    """The figures of the JSON line, by number of streams; tokens_per_s of all streams together.

    peers: tokens per second of one stream, from the median round
    """
    steps = {str(batch): values for batch, values in measured.step_s.items()}
    return {
        "tokens_per_s": {
            str(batch): round(batch * len(values) / sum(values), 2)
            for batch, values in measured.step_s.items()
        },
        "peers": {
            name: {"1": round(1 / median(values), 2)} for name, values in measured.peers_s.items()
        },
        "step_ms": {key: round(1000 * median(values), 3) for key, values in steps.items()},
        "step_p99_ms": {key: round(1000 * percentile(v, 99), 3) for key, v in steps.items()},
        "num_steps": {key: len(values) for key, values in steps.items()},
    }


def make_table(result: Mapping[str, Any], lengths: Lengths) -> Table:
    """One row per number of streams, then one per peer."""
    from rich.table import Table

    title = f"Decoding {lengths.tokens} tokens behind {lengths.context}"
    table = Table("streams", title=title)
    for heading in ("tokens/s together", "ms per step", "p99"):
        table.add_column(heading, justify="right")
    for key, rate in result["tokens_per_s"].items():
        times = (f"{result[name][key]:.2f}" for name in ("step_ms", "step_p99_ms"))
        table.add_row(key, f"{rate:.1f}", *times)
    for name, rates in result["peers"].items():
        table.add_row(f"1, {name}", f"{rates['1']:.1f}", f"{1000 / rates['1']:.2f}", "")
    return table
