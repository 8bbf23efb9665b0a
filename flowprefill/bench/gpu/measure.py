"""What `bench gpu-bench` measures on one model: each function is one stage.

Each gives the figures of its part of the JSON object, and says what it left out for lack of time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowprefill.bench import blocking, decode, prefill
from flowprefill.bench.blocking_run import BlockingBench, Cell
from flowprefill.bench.gemm_ceiling import gemm_flops
from flowprefill.bench.gpu.random_model import RandomModel, kv_bytes, weight_bytes
from flowprefill.bench.gpu.reference import NAME as REFERENCE
from flowprefill.bench.gpu.reference import Reference
from flowprefill.bench.gpu.stages import Budget
from flowprefill.bench.gpu.synchronising import with_synchronise_per_operator
from flowprefill.bench.prefill_modes import MODES, Prefiller
from flowprefill.bench.prefill_rounds import MIN_ROUNDS, Rounds, run_rounds
from flowprefill.bench.progress import BenchProgress
from flowprefill.bench.session import Session
from flowprefill.clock import MonotonicClock
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import Group

SYNCHRONISED = "op, synchronised"
GRANULARITIES = {"tile": 4.0, "op": 2.0, "layer": 2.0, SYNCHRONISED: 2.0}
"""And the time of each, in any unit: the bar is that of the first."""
_ROUND_PREEMPTIONS = 25
"""Asked for at a time, between two looks at the clock."""
_ROUND_PREFILLS = 6
"""That so many take at first, about."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: of a card, or of a dry run."""

    lengths: tuple[int, ...]
    """Tokens of prompts, the one that the bars are of first."""
    max_rounds: int
    preemptions: int
    """Of each granularity and length."""
    short_tokens: int
    """Of the prompts that preempt."""
    batches: tuple[int, ...]
    decode_lengths: decode.Lengths
    parked: int
    """Prefills that are parked side by side, at most."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def shares(self) -> Sequence[float]:
        """Of what is left of a stage, for each length: more for the first ones."""
        return shares_of_rest(range(len(self.lengths), 0, -1))


def shares_of_rest(weights: Sequence[float]) -> Sequence[float]:
    """The share that each of several things has of what the ones before it left."""
    return [weight / sum(weights[index:]) for index, weight in enumerate(weights)]


# ---- prefill ------------------------------------------------------------------------------------


def measure_prefill(
    random_model: RandomModel,
    reference: Reference | None,
    sizes: Sizes,
    seed: int,
    progress: BenchProgress,
    budget: Budget,
) -> dict[str, Any]:
    """As `bench prefill` has it; reference: stands there as a peer."""
    model, predictor = random_model.model, random_model.predictor()
    ways = _ways(random_model, reference)
    spec = model.spec
    rounds: dict[int, Rounds] = {}
    gemm = [gemm_flops(spec, model.dtype, model.device.torch_device)]
    for length, share in zip(sizes.lengths, sizes.shares, strict=True):
        needed_s = predictor.prefill_s(length) * len(ways) * (MIN_ROUNDS + 1)
        if not budget.allows(f"prefill of {length} tokens", needed_s):
            continue
        progress.describe(f"prefill of {length} tokens")
        part = budget.part(share)
        these = {name: partial(way, length) for name, way in ways.items()}
        try:
            rounds[length] = run_rounds(
                these, sizes.max_rounds, part.left_s, seed, on_round=lambda: None
            )
        except torch.OutOfMemoryError:
            budget.cut(f"prefill of {length} tokens: the card has no memory for one of the ways")
            continue
        gemm.append(gemm_flops(spec, model.dtype, model.device.torch_device))
    if not rounds:
        return {}
    by_length = dict(sorted(rounds.items()))
    counts = {length: length for length in by_length}
    measured = prefill.Measured(spec, {}, counts, by_length, max(gemm))
    return prefill.summarise(measured, [REFERENCE] if reference else [])


def _ways(
    random_model: RandomModel, reference: Reference | None
) -> dict[str, Callable[[int, int], float]]:
    """Functions of a prompt's tokens and its seed, by the name of the way."""
    model = random_model.model
    prefiller = Prefiller(model, random_model.predictor())

    def timed(seconds: Callable[[Sequence[int]], float], num_tokens: int, seed: int) -> float:
        return seconds(prefill.random_tokens(model.spec.vocab_size, num_tokens, seed))

    ways: dict[str, Callable[[int, int], float]] = {
        mode: partial(timed, partial(prefiller.seconds, mode)) for mode in MODES
    }
    return ways | ({REFERENCE: partial(timed, reference.prefill_s)} if reference else {})


# ---- blocking -----------------------------------------------------------------------------------


def measure_blocking(
    random_model: RandomModel, sizes: Sizes, seed: int, progress: BenchProgress, budget: Budget
) -> dict[str, Any]:
    """Figures of `bench blocking` by granularity and length."""
    results: dict[str, Any] = {}
    shares = shares_of_rest([*GRANULARITIES.values()])
    for name, share in zip(GRANULARITIES, shares, strict=True):
        part = budget.part(share)
        if not part.allows(f"blocking at {name}"):
            continue
        found = _measure_granularity(random_model, name, sizes, seed, progress, part)
        if found:
            results[name] = dict(sorted(found.items(), key=lambda item: int(item[0])))
    return results


def _measure_granularity(
    random_model: RandomModel,
    name: str,
    sizes: Sizes,
    seed: int,
    progress: BenchProgress,
    budget: Budget,
) -> dict[str, Any]:
    """One engine; all lengths on it."""
    if name == SYNCHRONISED:
        random_model = with_synchronise_per_operator(random_model, sizes.longest)
    granularity = "op" if name == SYNCHRONISED else name
    config = dataclasses.replace(random_model.config, granularity=granularity, policy="s-edf")
    prefill_s = random_model.predictor().prefill_s
    results: dict[str, Any] = {}
    with Session(config, seed, progress.show_loading, random_model.for_engine) as session:
        bench = BlockingBench(session, sizes.short_tokens, seed)
        bench.warm_up()
        for length, share in zip(sizes.lengths, sizes.shares, strict=True):
            part = budget.part(share)
            what = f"blocking of {length} tokens at {name}"
            if not part.allows(what, _ROUND_PREFILLS * prefill_s(length)):
                continue
            progress.describe(what)
            cell = _measure_cell(bench, length, sizes.preemptions, part)
            if len(cell.blocking_s) < sizes.preemptions:
                part.cut(f"{what}: {len(cell.blocking_s)} of {sizes.preemptions} preemptions")
            results[str(length)] = blocking.summarise(cell, length)
    return results


def _measure_cell(bench: BlockingBench, length: int, preemptions: int, budget: Budget) -> Cell:
    """Some preemptions at a time, as long as there is time; the first ones in any case."""
    cell = Cell()
    while (num_left := preemptions - len(cell.blocking_s)) > 0:
        if cell.interrupted and not budget.left_s:
            break
        more = bench.measure(length, min(num_left, _ROUND_PREEMPTIONS), lambda count: None)
        cell.undisturbed_s += more.undisturbed_s
        cell.interrupted += more.interrupted
    return cell


# ---- decode -------------------------------------------------------------------------------------


def measure_decode(
    random_model: RandomModel, sizes: Sizes, seed: int, progress: BenchProgress, budget: Budget
) -> dict[str, Any]:
    """Figures of `bench decode` by number of streams."""
    config, predictor = random_model.config, random_model.predictor()
    lengths = sizes.decode_lengths
    step_s: dict[int, list[float]] = {}
    with Session(config, seed, progress.show_loading, random_model.for_engine) as session:
        for batch in sizes.batches:
            needed_s = batch * predictor.prefill_s(lengths.context)
            needed_s += lengths.tokens * predictor.decode_step_s(batch, batch * lengths.context)
            if not budget.allows(f"decode of {batch} streams", needed_s):
                continue
            info = session.engine.info
            if batch * (lengths.context + lengths.tokens) > info.num_kv_blocks * info.block_size:
                budget.cut(f"decode of {batch} streams: the KV cache has no room")
                continue
            progress.describe(f"decode of {batch} streams")
            warm_up = decode.Lengths(min(64, lengths.context), 8)
            decode.decode_streams(session, batch, warm_up)
            streams = decode.decode_streams(session, batch, lengths)
            step_s[batch] = decode.steady_steps(streams)
    return decode.summarise(decode.Measured(step_s)) if step_s else {}


# ---- parked prefills ----------------------------------------------------------------------------


def measure_parked(
    random_model: RandomModel, sizes: Sizes, progress: BenchProgress, budget: Budget
) -> dict[str, Any]:
    """Bytes that prefills hold when they are parked in an MLP group of their first layer."""
    model, num_tokens = random_model.model, sizes.longest
    num_parked = _num_parked(random_model, sizes)
    if num_parked < sizes.parked:
        budget.cut(f"parked prefills: the KV cache has room for {num_parked} of {sizes.parked}")
    if not num_parked:
        return {}
    progress.describe(f"{num_parked} parked prefills of {num_tokens} tokens")
    results: dict[str, Any] = {}
    for granularity in ("tile", "op"):
        parked: list[ProgramState] = []  # those of the last one go, before anything is counted
        before = _allocated(model.device.torch_device)
        parked = [
            _park(random_model, index, num_tokens, granularity) for index in range(num_parked)
        ]
        after = _allocated(model.device.torch_device)
        results[granularity] = {
            "live_bytes_each": parked[0].live_bytes,
            "allocated_bytes_each": None
            if after is None
            else (after - (before or 0)) // num_parked,
            "share": round(_share(random_model, [p.live_bytes for p in parked], num_tokens), 5),
        }
    return {**results, "num_parked": num_parked, "num_tokens": num_tokens}


def _num_parked(random_model: RandomModel, sizes: Sizes) -> int:
    cache = random_model.model.cache
    return min(sizes.parked, cache.num_blocks // _blocks_of(random_model, sizes.longest))


def _blocks_of(random_model: RandomModel, num_tokens: int) -> int:
    return -(-num_tokens // random_model.model.cache.block_size)


def _park(random_model: RandomModel, index: int, num_tokens: int, granularity: str) -> ProgramState:
    """A prefill on the index-th share of the cache, left in its first MLP group."""
    model, num_blocks = random_model.model, _blocks_of(random_model, num_tokens)
    blocks = range(index * num_blocks, (index + 1) * num_blocks)
    table = BlockTable(blocks, model.cache.block_size, model.device.torch_device)
    prompt = prefill.random_tokens(model.spec.vocab_size, num_tokens, index)
    inputs = [SequenceInput(prompt, 0, table)]
    state = model.program.prefill(inputs, Granularity.parse(granularity))
    never = Interrupt(MonotonicClock())
    never.raise_now()  # kernels of a CPU run one slice a call
    while state.next_slice.group is not Group.MLP:
        model.device.run(state.run_slice, 0.0, never)
    model.device.run(state.run_slice, 0.0, never)
    model.device.wait()
    return state


def _allocated(device: torch.device) -> int | None:
    """Bytes of tensors on a card; None on a CPU, where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _share(random_model: RandomModel, live_bytes: Sequence[int], num_tokens: int) -> float:
    """Live tensors of all of them over weights and their KV blocks."""
    spec, dtype = random_model.model.spec, random_model.model.dtype
    kv = len(live_bytes) * kv_bytes(spec, dtype, num_tokens)
    return sum(live_bytes) / (weight_bytes(spec, dtype) + kv)
