"""Tiny models that two or three ranks share, with slices so small that a pass has many."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.loading import LoadedModel, load_model
from flowprefill.parallel.errors import RankError
from flowprefill.parallel.ranks import Ranks
from flowprefill.programs.program import ProgramState
from flowprefill.programs.slices import SliceLimits
from tests.factories import write_tiny_model
from tests.unit.parallel.skewed_follower import maybe_wait
from tests.unit.programs.runs import TILE, Runner, random_tokens, run_to_end

SKEWED = "tests.unit.parallel.skewed_follower"
LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 64, mlp_rows=32)
WAIT_S = 60.0
LENGTHS = (200, 90, 33)
GRANULARITIES = (TILE, Granularity("op"), Granularity("chunk", 20))


def write_model(directory: Path) -> Path:
    return write_tiny_model(directory, "qwen2", heads=6, kv_heads=6, num_layers=2)


@contextmanager
def divided(
    path: Path, num_ranks: int = 2, module: str | None = None, dtype: str = "float32"
) -> Iterator[LoadedModel]:
    """The model on so many ranks of one thread each, all of which have ended at the end."""
    config = EngineConfig(
        str(path), dtype=dtype, device="cpu", num_threads=1, tensor_parallel_size=num_ranks
    )
    model = load_model(config, lambda stage, fraction: None, rank_module=module)
    model.program.limits = LIMITS
    ranks = ranks_of(model)
    try:
        yield model
    finally:
        ranks.close()
    assert not any(child.process.poll() is None for child in ranks._children)


def ranks_of(model: LoadedModel) -> Ranks:
    assert model.ranks is not None
    return model.ranks


def death_of(ranks: Ranks) -> threading.Event:
    """Set when a rank has ended."""
    died = threading.Event()

    def note(error: RankError) -> None:
        died.set()

    ranks.call_on_death(note)
    return died


def prompts() -> list[list[int]]:
    return [random_tokens(n, seed=n) for n in LENGTHS]


def answers(model: LoadedModel) -> list[Tensor]:
    """Logits of three prompts, of a step of all three, and of the prompts packed into one pass."""
    runner = Runner(model)
    logits = [runner.prefill(p, TILE, sequence=i) for i, p in enumerate(prompts())]
    steps = [runner.input([7], len(p), i) for i, p in enumerate(prompts())]
    packed = [runner.input(p, 0, i) for i, p in enumerate(prompts())]
    states = [runner.program.decode(steps), runner.program.prefill(packed, TILE)]
    for state in states:
        while not state.is_done:
            state.run_slice()
        logits += list(state.logits)
    return logits


class Stops:
    """Passes by turns on one program, each left at a random boundary for another one."""

    def __init__(self, model: LoadedModel, draw: random.Random) -> None:
        self._runner = Runner(model)
        self._draw = draw
        self._starts: list[Callable[[], ProgramState]] = [
            *[lambda i=i: self.prefill(i) for i in range(len(LENGTHS))],
            self.decode,
        ]
        self._active: dict[int, ProgramState] = {}
        self._expected = [run_to_end(start()).clone() for start in self._starts]
        self.num_stops = self.num_ends = 0

    def run(self, num_stops: int) -> None:
        last = -1
        while self.num_stops < num_stops:
            last = self._draw.choice([i for i in range(len(self._starts)) if i != last])
            self._run_some(last)
        for which in list(self._active):
            self._finish(which)

    def _run_some(self, which: int) -> None:
        """Up to four boundaries of a pass."""
        state = self._active.get(which) or self._starts[which]()
        self._active[which] = state
        num_left = self._draw.randint(1, 4)
        while num_left and not state.is_done:
            maybe_wait(self._draw)
            num_left -= state.run_slice()
        if state.is_done:
            self._finish(which)
            return
        self.num_stops += 1
        if self._draw.random() < 0.02:
            del self._active[which]  # cancelled

    def _finish(self, which: int) -> None:
        logits = run_to_end(self._active.pop(which))
        assert torch.equal(logits, self._expected[which])
        self.num_ends += 1

    def prefill(self, i: int) -> ProgramState:
        return self._runner.program.prefill(
            [self._runner.input(prompts()[i], 0, i)], GRANULARITIES[i]
        )

    def decode(self) -> ProgramState:
        inputs = [self._runner.input([7], n, i) for i, n in enumerate(LENGTHS)]
        return self._runner.program.decode(inputs)
