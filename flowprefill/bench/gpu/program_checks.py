"""Checks of whole passes of a small random model on the device, and of an engine that runs them.

That a pass may be left anywhere and changes no bit, that nothing within it waits for the device,
that decode steps and prompts over cached blocks give what the whole prompt gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from flowprefill.bench.gpu.checks import Check, NotChecked
from flowprefill.bench.gpu.random_model import RandomModel
from flowprefill.bench.prefill import random_tokens
from flowprefill.bench.session import Session
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.request import SLO

TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.25, 0.05)}
"""Absolute and relative, of logits of about unit size: products of another number of rows may be
summed otherwise."""
_TILE_ROWS, _MLP_ROWS, _ATTENTION_WORK = 32, 16, 16 * 64
"""Several tiles, and several slices of attention and MLP in each, of prompts this short."""
GRANULARITIES = ("tile", "op", "chunk:20")
_SHORT = 10
"""Tokens of so few sequences are few enough for slices of whole layers (LAYERS)."""
_TRIES, _DELAY_STEP_S = 20, 0.0005
"""How long an urgent prompt is sent behind the long one, more each time: until it meets it."""
_TILE = Granularity("tile")
_URGENT, _PATIENT = SLO(ttft_s=60.0, tbt_s=10.0), SLO(ttft_s=3600.0, tbt_s=10.0)


class Passes:
    """Passes of a loaded model. Sequence i owns the i-th share of the blocks, dealt at random."""

    def __init__(self, model: LoadedModel, num_sequences: int) -> None:
        self.model = model
        share = model.cache.num_blocks // num_sequences
        blocks = random.Random(0).sample(range(model.cache.num_blocks), model.cache.num_blocks)
        self._blocks = [blocks[i * share : (i + 1) * share] for i in range(num_sequences)]

    def input(self, tokens: Sequence[int], start: int, sequence: int) -> SequenceInput:
        """Tokens at positions from `start` on."""
        device = self.model.device.torch_device
        num_blocks = -(-(start + len(tokens)) // self.model.cache.block_size)
        blocks = self._blocks[sequence][:num_blocks]
        assert len(blocks) == num_blocks, "the cache is too small for this check"
        return SequenceInput(tokens, start, BlockTable(blocks, self.model.cache.block_size, device))

    def prefill(
        self, tokens: Sequence[int], start: int = 0, sequence: int = 0, granularity: str = "tile"
    ) -> ProgramState:
        inputs = [self.input(tokens, start, sequence)]
        return self.model.program.prefill(inputs, Granularity.parse(granularity))

    def decode(self, rows: Sequence[tuple[int, int]]) -> ProgramState:
        """One step; rows: (token, position) of each sequence, from the first on."""
        inputs = [self.input([token], at, i) for i, (token, at) in enumerate(rows)]
        return self.model.program.decode(inputs)


def finish(state: ProgramState) -> Tensor:
    """Run to the end; [num_seqs, vocab]."""
    while not state.is_done:
        state.run_slice()
    return state.logits


@contextlib.contextmanager
def refusing_to_synchronise() -> Iterator[None]:
    """On a card: whatever torch would wait for the device for raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: str | int) -> None:
    """Without the warning that it is a prototype, which may be an error, when it is set already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def program_checks(model: LoadedModel, lengths: Sequence[int]) -> list[Check]:
    """model: nobody else uses its cache; lengths: tokens of the prompts"""
    model.program.limits = dataclasses.replace(
        model.program.limits,
        tile_rows=_TILE_ROWS,
        mlp_rows=_MLP_ROWS,
        attention_work=_ATTENTION_WORK,
        decode_bytes=0,
    )
    return [
        Check("parked anywhere, the same bits", partial(park_anywhere, model, lengths)),
        Check("no slice synchronises", partial(no_synchronise, model, lengths)),
        Check("decode steps equal the prefill", partial(decode_equals_prefill, model, lengths)),
        Check("decode graphs equal launches", partial(decode_graphs, model)),
        Check("a reused prefix equals the whole prompt", partial(reuse_prefix, model, lengths)),
    ]


def park_anywhere(model: LoadedModel, lengths: Sequence[int]) -> str:
    """Prefills of several granularities, of which a random one runs its next slice each time, over
    caches that held NaN, against the same ones run one after the other."""
    passes = Passes(model, len(lengths))

    def start_all() -> list[ProgramState]:
        prompts = [random_tokens(model.spec.vocab_size, n, n) for n in lengths]
        kinds = [GRANULARITIES[i % len(GRANULARITIES)] for i in range(len(lengths))]
        pairs = enumerate(zip(prompts, kinds, strict=True))
        return [passes.prefill(prompt, 0, i, kind) for i, (prompt, kind) in pairs]

    alone = [finish(state).clone() for state in start_all()]
    model.cache.k.fill_(torch.nan)
    model.cache.v.fill_(torch.nan)
    draw, states = random.Random(1), start_all()
    waiting, num_slices = list(states), 0
    while waiting:
        state = draw.choice(waiting)
        state.run_slice()
        num_slices += 1
        if state.is_done:
            waiting.remove(state)
    for state, expected in zip(states, alone, strict=True):
        assert bool(state.logits.isfinite().all()), "logits are not finite"
        assert torch.equal(state.logits, expected), "the bits differ"
    model.cache.k.zero_()
    model.cache.v.zero_()
    return f"{len(states)} prompts, {num_slices} slices"


def no_synchronise(model: LoadedModel, lengths: Sequence[int]) -> str:
    """Making a pass and launching its slices: prefills of each granularity, packed, and decode."""
    device = model.device.torch_device
    passes = Passes(model, len(lengths))
    prompts = [random_tokens(model.spec.vocab_size, n, n) for n in lengths]

    def run_all() -> int:
        num_slices = 0
        kinds = GRANULARITIES if device.type == "cuda" else GRANULARITIES[:1]
        states = [passes.prefill(prompts[0], granularity=kind) for kind in kinds]
        packed = [passes.input(prompt, 0, i) for i, prompt in enumerate(prompts)]
        states.append(model.program.prefill(packed, _TILE))
        # of many keys, and of few, which are graphs on a card
        states += [passes.decode([(1, n) for n in lengths]), passes.decode([(1, _SHORT)])]
        for state in states:
            while not state.is_done:
                state.run_slice()
                num_slices += 1
        return num_slices

    num_slices = run_all()  # compiles what was not yet compiled
    if device.type != "cuda":
        raise NotChecked(f"{num_slices} slices ran, on a CPU, where nothing is asynchronous")
    with refusing_to_synchronise():
        run_all()
    torch.cuda.synchronize(device)
    return f"{num_slices} slices"


def decode_equals_prefill(model: LoadedModel, lengths: Sequence[int]) -> str:
    """Steps of several sequences together, against prefills of the same tokens."""
    passes = Passes(model, len(lengths))
    tokens = [random_tokens(model.spec.vocab_size, n + 3, n) for n in lengths]
    for i, (length, prompt) in enumerate(zip(lengths, tokens, strict=True)):
        finish(passes.prefill(prompt[:length], sequence=i))
    for step in range(3):
        rows = [(t[n + step], n + step) for n, t in zip(lengths, tokens, strict=True)]
        decoded = finish(passes.decode(rows)).clone()
    whole = [finish(passes.prefill(prompt, sequence=i))[0] for i, prompt in enumerate(tokens)]
    return _near(decoded, torch.stack(whole), model.dtype)


def decode_graphs(model: LoadedModel) -> str:
    """A step of three sequences, padded to a bucket of four, as graphs and kernel by kernel."""
    from flowprefill.programs.triton_operators import TritonOperators

    if model.device.torch_device.type != "cuda":
        raise NotChecked("a CPU has no graphs")
    operators = model.program.operators
    assert isinstance(operators, TritonOperators) and operators.graphs, model.kernels
    passes, num_seqs = Passes(model, 3), 3
    for i in range(num_seqs):
        prompt = random_tokens(model.spec.vocab_size, _SHORT, i)
        finish(passes.prefill(prompt, sequence=i))
    rows = [(token, _SHORT) for token in range(num_seqs)]
    with_graphs = finish(passes.decode(rows)).clone()
    graphs, operators.graphs = operators.graphs, None
    try:
        launched = finish(passes.decode(rows))
    finally:
        operators.graphs = graphs
    return _near(with_graphs, launched, model.dtype)


def reuse_prefix(model: LoadedModel, lengths: Sequence[int]) -> str:
    """The end of a prompt over the blocks that its beginning left."""
    passes, length = Passes(model, 1), max(lengths)
    prompt = random_tokens(model.spec.vocab_size, length, 0)
    whole = finish(passes.prefill(prompt)).clone()
    cached = length // 2 // model.cache.block_size * model.cache.block_size
    rest = finish(passes.prefill(prompt[cached:], start=cached))
    return f"{cached} of {length} tokens cached, {_near(rest, whole, model.dtype)}"


def _near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
    if torch.equal(ours, theirs):
        return "the same bits"
    return f"largest difference {float((ours - theirs).abs().max()):.1e}"


# ---- the engine ---------------------------------------------------------------------------------


def engine_checks(random_model: RandomModel, long_tokens: int) -> list[Check]:
    """Checks that share one engine after the other; long_tokens: of the prompt that is preempted"""
    return [
        Check("engine: a preempted prompt's tokens", partial(preempt, random_model, long_tokens)),
        Check("engine: a cached prefix is found", partial(find_prefix, random_model, long_tokens)),
    ]


def preempt(random_model: RandomModel, long_tokens: int) -> str:
    """A long prompt gives the same tokens with urgent ones beside it as alone."""
    # each time the whole prompt is to be computed
    config = dataclasses.replace(random_model.config, enable_prefix_caching=False, policy="s-edf")
    with Session(config, 0, _quiet, random_model.for_engine) as session:
        prompt = session.random_prompt(long_tokens)
        short = session.random_prompt(8)
        alone = session.wait_end(session.submit(prompt, _PATIENT, max_tokens=1)).token_ids
        short_alone = session.wait_end(session.submit(short, _URGENT, max_tokens=8)).token_ids
        num_preempted = 0
        for index in range(_TRIES):
            delay_s = index * _DELAY_STEP_S
            num_preempted += _preempt_once(session, delay_s, prompt, alone, short, short_alone)
            if num_preempted >= 3:
                break
        assert num_preempted, f"no prompt was preempted in {_TRIES} tries"
        return f"{num_preempted} preemptions"


def _preempt_once(
    session: Session,
    delay_s: float,
    prompt: Sequence[int],
    alone: Sequence[int],
    short: Sequence[int],
    short_alone: Sequence[int],
) -> bool:
    """Whether the long prompt was preempted. Raises AssertionError if a token differs."""
    long = session.submit(prompt, _PATIENT, max_tokens=1)
    time.sleep(delay_s)
    urgent = session.wait_end(session.submit(short, _URGENT, max_tokens=len(short_alone)))
    session.wait_end(long)
    assert long.token_ids == alone, "the long prompt's token differs"
    assert urgent.token_ids == short_alone, "the urgent prompt's tokens differ"
    return urgent.blocking_s is not None


def find_prefix(random_model: RandomModel, long_tokens: int) -> str:
    """The same prompt again takes its blocks from the cache."""
    with Session(random_model.config, 1, _quiet, random_model.for_engine) as session:
        prompt = session.random_prompt(long_tokens)
        for _ in range(2):
            answer = session.wait_end(session.submit(prompt, _PATIENT, max_tokens=4))
        assert answer.prefill is not None
        num_cached = answer.prefill.num_cached_tokens
        assert num_cached >= long_tokens // 2, f"{num_cached} of {long_tokens} tokens were cached"
        info = session.engine.info
        kept = "kept" if info.bit_invariant else "not kept"
        return f"{num_cached} of {long_tokens} tokens; bits across row counts are {kept}"


def _quiet(stage: str, fraction: float) -> None:
    pass
