"""`flowprefill bench servers`: the same replay through our server and through others.

A stretch of a trace goes to one server after the other, on this machine, over their own protocols:
our tritonserver, and the peers of a file. Measured of each are the highest load with 90% of the
requests on time and with 90% of every class, and a short prompt behind a long one. Beside ours
stands the same engine without its server, as `bench goodput` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.bench.options import (
    Blocks,
    JsonOut,
    LengthDivisor,
    ModelJson,
    OutputTokens,
    PeersFile,
    Records,
    Seed,
    Trace,
    finite,
    load_config,
)
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import VOID_EXIT_CODE, describe_run, print_json, print_void

if TYPE_CHECKING:
    from flowprefill.bench.goodput_outcomes import CellResult, Outcome, OutcomeStore
    from flowprefill.bench.goodput_plan import GoodputPlan
    from flowprefill.bench.goodput_runs import Cell
    from flowprefill.bench.pace import Pace
    from flowprefill.bench.peers.spec import Conditions
    from flowprefill.bench.server_report import Results
    from flowprefill.bench.server_runs import Contender
    from flowprefill.config import EngineConfig

DEFAULT_CELLS = "goodput/tile,s-edf/tile"


def run(
    trace: Trace,
    cells: Annotated[
        str, typer.Option(help="Of our server: policy/granularity, separated by commas.")
    ] = DEFAULT_CELLS,
    peers_file: PeersFile = None,
    peer_load: Annotated[
        float | None,
        typer.Option(
            min=0.02,
            callback=finite,
            help="Load at which to begin with a peer; default: that of fcfs/whole by simulation.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of the trace, in one go.")] = 150,
    blocks: Blocks = 10,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds of a short prompt behind a long one.")
    ] = 3,
    length_divisor: LengthDivisor = 8.0,
    output_tokens: OutputTokens = 1,
    records: Records = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure the highest load with 90% on time of our server and of others, side by side.

    Prompts are cached by nobody: they are the same at each load. If the requests of any replay were
    sent more than 5 ms late (99th percentile) the figures are void: exit code 3.
    """
    from rich.console import Console

    from flowprefill.bench.goodput_outcomes import OutcomeStore
    from flowprefill.bench.goodput_plan import check_blocks, make_plan
    from flowprefill.bench.goodput_runs import with_cell
    from flowprefill.bench.peers.spec import read_peers
    from flowprefill.bench.server_contenders import our_contender, peer_contender
    from flowprefill.bench.server_report import make_tables, summarise
    from flowprefill.bench.simulate_plan import measured_plan
    from flowprefill.bench.this_cpu import paced_cpu

    check_blocks(requests, blocks)
    config = replace(load_config(model_json, None), enable_prefix_caching=False)
    peers = read_peers(None, peers_file, config)
    facts = {
        "trace": trace.name,
        "requests": requests,
        "blocks": blocks,
        "length_divisor": length_divisor,
        "output_tokens": output_tokens,
    }
    run_facts = {
        **describe_run(config, seed),
        **facts,
        "rounds": rounds,
        "peers": {peer.name: {"worker": peer.worker, **peer.options} for peer in peers},
    }
    with bench_progress(None) as progress:
        platform, pace = paced_cpu(config, progress.show_loading)
        options = measured_plan(platform, trace, requests, output_tokens, 1 / length_divisor)
        plan = make_plan(options, blocks, cells.split(","), progress.describe)
        store = OutcomeStore(records, key=f"servers {config} {seed} {facts} {plan.scale}")
        engines = measure_engines(config, plan, seed, progress, store, pace)
        contenders = [
            our_contender(
                server_name(cell), with_cell(config, cell), _highest(engines[engine_name(cell)])
            )
            for cell in plan.guesses
        ]
        if peers:
            loads = (peer_load, peer_load) if peer_load else _peer_guess(plan, progress.describe)
            conditions = _conditions(config, plan, progress)
            contenders += [peer_contender(peer, conditions, loads) for peer in peers]
        results = measure_servers(config, plan, contenders, rounds, seed, progress, store, pace)
    ours = [*map(engine_name, plan.guesses), *map(server_name, plan.guesses)]
    results = replace(results, by_name={**engines, **results.by_name})
    result = summarise(plan, results, ours, [peer.name for peer in peers], seed)
    for table in make_tables(plan, result):
        Console(width=150).print(table)
    if result["void"]:
        print_void(max(result["send_lag_p99_ms"].values()))
    print_json({**result, "run": run_facts}, json_out)
    raise typer.Exit(VOID_EXIT_CODE if result["void"] else 0)


def engine_name(cell: Cell) -> str:
    """Of a cell whose engine runs in this process."""
    return cell.name


def server_name(cell: Cell) -> str:
    """Of a cell behind tritonserver."""
    return f"{cell.name} in tritonserver"


def measure_engines(
    config: EngineConfig,
    plan: GoodputPlan,
    seed: int,
    progress: BenchProgress,
    store: OutcomeStore,
    pace: Pace,
) -> dict[str, CellResult]:
    """Our cells without a server."""
    from flowprefill.bench.goodput_runs import GoodputRuns

    runs = GoodputRuns(config, plan, seed, progress, store, pace)
    try:
        return {
            engine_name(cell): _search(partial(runs.measure, cell), guesses)
            for cell, guesses in plan.guesses.items()
        }
    finally:
        runs.close()


def measure_servers(
    config: EngineConfig,
    plan: GoodputPlan,
    contenders: Sequence[Contender],
    rounds: int,
    seed: int,
    progress: BenchProgress,
    store: OutcomeStore,
    pace: Pace,
) -> Results:
    """One after the other."""
    from flowprefill.bench.server_report import Results
    from flowprefill.bench.server_runs import ServerRuns
    from flowprefill.replay.prompts import PromptMaker
    from flowprefill.tokenizer import load_tokenizer

    maker = PromptMaker(load_tokenizer(config).encode, seed)
    runs = ServerRuns(plan, maker, progress, store, pace)
    results = Results({}, {}, runs.versions)
    try:
        for contender in contenders:
            measure = partial(runs.measure, contender)
            results.by_name[contender.name] = _search(measure, contender.guesses)
            if rounds:
                results.encounters[contender.name] = runs.meet(contender, rounds)
        return results
    finally:
        runs.close()


def _search(measure: Callable[[float], list[Outcome]], guesses: tuple[float, float]) -> CellResult:
    from flowprefill.bench.goodput_outcomes import (
        CellResult,
        attainment,
        search_loads,
        worst_class_attainment,
    )

    result = CellResult()
    search_loads(measure, guesses[0], attainment, result)
    # What the first search has found says more than the second guess alone.
    guess = _highest(result)[0] * guesses[1] / guesses[0]
    search_loads(measure, guess, worst_class_attainment, result)
    return result


def _highest(result: CellResult) -> tuple[float, float]:
    """Loads: overall, and with every class."""
    from flowprefill.bench.crossing import crossing
    from flowprefill.bench.goodput_outcomes import (
        TARGET,
        attainment,
        curve,
        worst_class_attainment,
    )

    overall, every_class = (
        crossing(curve(result.by_load, measure_of), TARGET)
        for measure_of in (attainment, worst_class_attainment)
    )
    return overall, every_class


def _peer_guess(plan: GoodputPlan, describe: Callable[[str], None]) -> tuple[float, float]:
    """Most serve by arrival; none of them leaves a step."""
    from flowprefill.bench.compared import BASELINE
    from flowprefill.bench.goodput_plan import Guess
    from flowprefill.bench.goodput_runs import Cell

    return Guess(plan.window, plan.platform, describe).loads(Cell.parse(BASELINE))


def _conditions(config: EngineConfig, plan: GoodputPlan, progress: BenchProgress) -> Conditions:
    """The same as our engine's."""
    from flowprefill.bench.peers.spec import Conditions
    from flowprefill.loading import load_model

    model = load_model(config, progress.show_loading)
    limit = plan.platform.max_tokens
    return Conditions.of(config, model.spec.vocab_size, str(model.dtype), limit)
