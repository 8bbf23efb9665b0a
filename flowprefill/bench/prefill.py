"""`flowprefill bench prefill`: tokens per second of a prefill, and what slicing costs.

In-process, without server and scheduler, one prompt at a time on an idle engine. The same prompt is
prefilled in slices as the engine does it, in the same slices without checks, by whole-prompt
operators, and by other engines if given, in alternating rounds. Beside them stands the rate of the
machine's matrix product.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.flops import prefill_flops
from flowprefill.bench.intervals import median_and_interval
from flowprefill.bench.options import (
    Dtype,
    JsonOut,
    ModelJson,
    PeerOptions,
    PeersFile,
    Seed,
    finite,
    load_config,
    prompt_tokens,
)
from flowprefill.bench.peers.spec import Conditions, PeerSpec, read_peers
from flowprefill.bench.prefill_rounds import Rounds, run_rounds
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import describe_run, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.peers.process import Peer
    from flowprefill.config import EngineConfig
    from flowprefill.loading import LoadedModel
    from flowprefill.predictor.fitted import FittedPredictor
    from flowprefill.programs.model_spec import ModelSpec

LENGTHS = (128, 512, 2048, 4096, 8192)
SLICED, UNCHECKED, WHOLE = "sliced", "unchecked", "whole"
"""As in prefill_modes.MODES, which needs torch."""


@dataclass
class Measured:
    """One run."""

    spec: ModelSpec
    facts: dict[str, Any]
    """Of model and peers, for the JSON line."""
    num_tokens: dict[int, int]
    """Tokens of the prompts, by the length asked for."""
    rounds: dict[int, Rounds]
    gemm_flops: float
    """FLOP/s of the best matrix product that was seen."""


def run(
    lengths: Annotated[
        list[int] | None,
        typer.Option(min=2, help=f"Tokens of a prompt; may be repeated. Default: {LENGTHS}."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a length at most.")] = 20,
    budget_s: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Time for a length, from the third round on."),
    ] = 300.0,
    peer: PeerOptions = None,
    peers_file: PeersFile = None,
    dtype: Dtype = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure prefill throughput beside its ceilings and beside other engines."""
    from rich.console import Console

    config = load_config(model_json, dtype)
    peers = read_peers(peer, peers_file, config)
    measured = measure(config, sorted(set(lengths or LENGTHS)), peers, rounds, budget_s, seed)
    result = summarise(measured, [peer.name for peer in peers])
    Console(width=140).print(make_table(result))
    print_json({**result, "run": {**describe_run(config, seed), **measured.facts}}, json_out)


def measure(
    config: EngineConfig,
    lengths: Sequence[int],
    peers: Sequence[PeerSpec],
    max_rounds: int,
    budget_s: float,
    seed: int,
) -> Measured:
    """Load the model, start the peers, run all rounds; shows progress on standard error."""
    from flowprefill.bench.gemm_ceiling import gemm_flops
    from flowprefill.bench.peers.process import describe_peers, start_peers
    from flowprefill.clock import MonotonicClock
    from flowprefill.granularity import Granularity
    from flowprefill.loading import load_model, profile_model
    from flowprefill.predictor.fitted import FittedPredictor

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bench_progress(len(lengths) * max_rounds))
        model = load_model(config, progress.show_loading)
        profile = profile_model(model, MonotonicClock(), progress.show_loading)
        predictor = FittedPredictor.from_profile(
            profile, model.spec.num_layers, model.program.limits, Granularity("tile")
        )
        limit = model.spec.max_position_embeddings
        counts = {n: prompt_tokens(n, limit) for n in lengths}
        conditions = Conditions.of(config, model.spec.vocab_size, str(model.dtype), limit)
        progress.describe("starting peers")
        running = stack.enter_context(start_peers(peers, conditions))
        ways = _ways(model, predictor, running)
        rounds: dict[int, Rounds] = {}
        gemm: list[float] = []

        def on_round() -> None:  # often: on a machine with noise the best of few is no ceiling
            gemm.append(gemm_flops(model.spec, model.dtype, model.device.torch_device))
            progress.advance()

        for length, num_tokens in counts.items():
            progress.describe(f"{length} tokens")
            these = {name: partial(prefill, num_tokens) for name, prefill in ways.items()}
            rounds[length] = run_rounds(these, max_rounds, budget_s, seed, on_round)
            progress.advance(max_rounds - rounds[length].num_rounds)
        facts = {"kernels": model.kernels, **describe_peers(conditions, running)}
        return Measured(model.spec, facts, counts, rounds, max(gemm))


def _ways(
    model: LoadedModel, predictor: FittedPredictor, peers: Sequence[Peer]
) -> dict[str, Callable[[int, int], float]]:
    """Functions of a prompt's tokens and its seed, by the name of the way."""
    from flowprefill.bench.prefill_modes import MODES, Prefiller

    prefiller = Prefiller(model, predictor)

    def ours(mode: str, num_tokens: int, seed: int) -> float:
        return prefiller.seconds(mode, random_tokens(model.spec.vocab_size, num_tokens, seed))

    ways: dict[str, Callable[[int, int], float]] = {mode: partial(ours, mode) for mode in MODES}
    return ways | {peer.name: peer.prefill_s for peer in peers}


def random_tokens(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Token ids of a prompt; peers/worker.py draws the same ones."""
    return random.Random(seed).choices(range(vocab_size), k=num_tokens)


# ---- figures ------------------------------------------------------------------------------------


def summarise(measured: Measured, peers: Sequence[str]) -> dict[str, Any]:
    """The figures of the JSON line, by length. Throughput ratios are medians over rounds.

    sliced_ratio: 0.98 = 2% slower than the faster of `unchecked` and `whole`; beside it its 95%
    interval, and which of them was the faster
    peer_ratio: our throughput over the peer's, and its interval
    """
    lengths = {str(n): n for n in measured.rounds}
    rates = {key: _rates(measured, n) for key, n in lengths.items()}
    rounds = {key: measured.rounds[n] for key, n in lengths.items()}
    base = {key: one.faster(UNCHECKED, WHOLE) for key, one in rounds.items()}
    slicing = {key: median_and_interval(r.ratios(SLICED, base[key])) for key, r in rounds.items()}
    ceilings = {}
    for key, n in lengths.items():
        flops = prefill_flops(measured.spec, measured.num_tokens[n])
        ceilings[key] = round(flops / rounds[key].median_s(SLICED) / measured.gemm_flops, 4)
    return {
        "tokens_per_s": {key: one[SLICED] for key, one in rates.items()},
        "sliced_ratio": {key: one[0] for key, one in slicing.items()},
        "ceiling_fraction": ceilings,
        "peers": {name: {key: one[name] for key, one in rates.items()} for name in peers},
        "sliced_ratio_interval": {key: one[1:] or None for key, one in slicing.items()},
        "sliced_ratio_base": base,
        "unchecked_tokens_per_s": {key: one[UNCHECKED] for key, one in rates.items()},
        "whole_tokens_per_s": {key: one[WHOLE] for key, one in rates.items()},
        "peer_ratio": {
            name: {key: median_and_interval(r.ratios(SLICED, name)) for key, r in rounds.items()}
            for name in peers
        },
        "gemm_gflops": round(measured.gemm_flops / 1e9, 1),
        "num_rounds": {key: one.num_rounds for key, one in rounds.items()},
        "num_tokens": {key: measured.num_tokens[n] for key, n in lengths.items()},
    }


def _rates(measured: Measured, length: int) -> dict[str, float]:
    """Tokens per second of each way, from its median."""
    rounds, num_tokens = measured.rounds[length], measured.num_tokens[length]
    return {name: round(num_tokens / rounds.median_s(name), 1) for name in rounds.seconds}


def make_table(result: Mapping[str, Any]) -> Table:
    """One row per length; result: as of summarise()."""
    from rich.table import Table

    table = Table(title="Prefill, tokens/s: medians of alternating rounds")
    peers = list(result["peers"])
    headings = ("tokens", "sliced", "no checks", "whole operators", "sliced / faster", "of GEMM")
    for heading in (*headings, *peers, "rounds"):
        table.add_column(heading, justify="right")
    for key, num_tokens in result["num_tokens"].items():
        names = ("tokens_per_s", "unchecked_tokens_per_s", "whole_tokens_per_s")
        cells = [f"{result[name][key]:,.0f}" for name in names]
        interval = result["sliced_ratio_interval"][key]
        ends = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        cells += [
            f"{result['sliced_ratio'][key]:.3f}{ends}",
            f"{result['ceiling_fraction'][key]:.1%}",
            *(
                f"{result['peers'][name][key]:,.0f} (x{result['peer_ratio'][name][key][0]:.2f})"
                for name in peers
            ),
        ]
        table.add_row(str(num_tokens), *cells, str(result["num_rounds"][key]))
    return table
