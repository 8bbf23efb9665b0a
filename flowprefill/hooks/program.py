"""HookedProgram: a transformers model as a Program, whose passes are suspended forward passes.

Boundaries change nothing of the arithmetic: which modules run, on which rows, is fixed when a pass
starts. A prompt is one forward pass, or where the cache can be continued and the granularity says
so one for each range of its tokens. Prompts are never packed: several inputs run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowprefill.granularity import Granularity
from flowprefill.hooks.causal_lm import CausalLM
from flowprefill.hooks.sequences import Sequence as Computed
from flowprefill.hooks.sequences import Sequences
from flowprefill.hooks.suspend import Forward
from flowprefill.interrupt import Interrupt
from flowprefill.programs.program import SequenceInput, SliceCost
from flowprefill.programs.slices import Group, Slice


class HookedProgram:
    """One model's passes, and the caches of its sequences."""

    def __init__(self, lm: CausalLM, tile_rows: int) -> None:
        """tile_rows: tokens of one forward pass in granularity `tile`"""
        self.lm = lm
        self.tile_rows = tile_rows
        self.sequences = Sequences()

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> HookedPrefill:
        """Start the prefill of prompts from their first token on: prefixes are not shared."""
        return HookedPrefill(self, inputs, granularity)

    def decode(self, inputs: Sequence[SequenceInput]) -> HookedDecode:
        """Start a decode step, batched if the cache allows it, else sequence by sequence."""
        return HookedDecode(self, inputs)

    def pass_tokens(self, granularity: Granularity) -> int | None:
        """Tokens of one forward pass of a prefill; None = those of the whole prompt."""
        if not self.lm.is_continued:
            return None
        return granularity.chunk_tokens or (self.tile_rows if granularity.kind == "tile" else None)


class _Work:
    """One forward pass of a state: what it computes, and for whom."""

    def __init__(self, members: Sequence[Computed], token_ids: Sequence[int], start: int) -> None:
        self.members = members
        self.token_ids = token_ids
        self.start = start
        """Of the keys: all that the members have in their caches, each as many as the longest."""
        self.forward: Forward | None = None

    def slice(self) -> Slice:
        """Its slices are all taken to be alike."""
        rows = len(self.token_ids)
        if len(self.members) > 1:
            return Slice(Group.LAYERS, 0, rows, num_keys=self.start + rows)
        # each row reads the keys before it
        return Slice(Group.LAYERS, 0, rows, num_keys=rows * self.start + rows * (rows + 1) // 2)


class _State:
    """Passes one after the other. Implements ProgramState but for the boundaries."""

    def __init__(self, program: HookedProgram) -> None:
        self._program = program
        self._lm = program.lm
        self._works: list[_Work] = []
        self._index = 0
        self._held: dict[object, int] = {}

    @property
    def is_done(self) -> bool:
        return self._index == len(self._works)

    @property
    def next_slice(self) -> Slice:
        return self._works[self._index].slice()

    @property
    def live_bytes(self) -> int:
        """Of the tensors that the suspended forward pass holds; known from its first boundary on.

        Layers are alike, so each kind of boundary is looked at once in a pass.
        """
        index = self._index  # once: statistics are taken by other threads
        forward = self._works[index].forward if index < len(self._works) else None
        return self._held.get((index, type(forward.module)), 0) if forward else 0

    def remaining_s(self, cost: SliceCost) -> float:
        if self.is_done:
            return 0.0
        per_pass = self._lm.num_slices
        left = [cost(work.slice()) for work in self._works[self._index :]]
        forward = self._works[self._index].forward
        num_run = min(forward.num_boundaries, per_pass - 1) if forward else 0
        return sum(left) * per_pass - left[0] * num_run

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        work = self._works[self._index]
        if work.forward is None:
            work.forward = self._start(work)
        if work.forward.run():
            self._index += 1
            self._finish(work, work.forward)
            work.forward = None  # its tensors
            return not self.is_done and self._may_leave_between()
        key = self._index, type(work.forward.module)
        if key not in self._held:
            self._held[key] = work.forward.held_bytes()
        return self._may_leave(work.forward)

    def _start(self, work: _Work) -> Forward:
        raise NotImplementedError

    def _finish(self, work: _Work, forward: Forward) -> None:
        raise NotImplementedError

    def _may_leave(self, forward: Forward) -> bool:
        raise NotImplementedError

    def _may_leave_between(self) -> bool:
        raise NotImplementedError


class HookedPrefill(_State):
    """The prefill of prompts, one by one."""

    def __init__(
        self, program: HookedProgram, inputs: Sequence[SequenceInput], granularity: Granularity
    ) -> None:
        super().__init__(program)
        self._granularity = granularity
        self._sequences = [program.sequences.of(i.table) for i in inputs]
        for one, sequence in zip(inputs, self._sequences, strict=True):
            assert one.start == 0 and not sequence.num_tokens, "no prefix is shared, none computed"
            self._works += _prompt_works(
                sequence, one.token_ids, program.pass_tokens(granularity) or len(one.token_ids)
            )

    @property
    def logits(self) -> Tensor:
        assert self.is_done, "the pass is not done"
        return torch.stack([s.logits for s in self._sequences if s.logits is not None])

    def _start(self, work: _Work) -> Forward:
        return self._lm.start(work.token_ids, work.members[0].cache, work.start)

    def _finish(self, work: _Work, forward: Forward) -> None:
        [sequence] = work.members
        sequence.cache = self._lm.cache_of(forward)
        sequence.num_tokens += len(work.token_ids)
        sequence.logits = self._lm.logits_of(forward)[0]

    def _may_leave(self, forward: Forward) -> bool:
        kind = self._granularity.kind
        if kind == "layer":
            return self._lm.boundaries.starts_layer(forward.module)
        return kind in ("op", "tile")

    def _may_leave_between(self) -> bool:
        return self._granularity.kind != "whole"


class HookedDecode(_State):
    """A decode step. It may be left at any boundary.

    Dropped midway, what it has begun stays with its sequences: a recurrent state cannot be taken
    back, so the next step of a sequence goes on with it, whoever else is a member.
    """

    def __init__(self, program: HookedProgram, inputs: Sequence[SequenceInput]) -> None:
        super().__init__(program)
        self._sequences = [program.sequences.of(i.table) for i in inputs]
        fresh: list[tuple[Computed, int]] = []
        begun: dict[int, _Work] = {}
        for one, sequence in zip(inputs, self._sequences, strict=True):
            if sequence.pending is not None:
                begun[id(sequence.pending)] = sequence.pending
            elif sequence.num_tokens == one.start:
                fresh.append((sequence, one.token_ids[0]))
            else:  # a dropped step had given this one its token
                assert sequence.num_tokens == one.start + 1, "a token was left out"
        self._works = [*begun.values(), *self._new_works(fresh)]

    @property
    def logits(self) -> Tensor:
        assert self.is_done, "the pass is not done"
        return torch.stack([s.logits for s in self._sequences if s.logits is not None])

    def _new_works(self, fresh: Sequence[tuple[Computed, int]]) -> Iterator[_Work]:
        batches = (
            _batches(fresh, self._lm.free_keys) if self._lm.is_batched else [[f] for f in fresh]
        )
        for batch in batches:
            members = [sequence for sequence, _ in batch]
            tokens = [token for _, token in batch]
            yield _Work(members, tokens, len(members) * max(s.num_tokens for s in members))

    def _start(self, work: _Work) -> Forward:
        for sequence in work.members:
            sequence.pending = work
        if len(work.members) == 1:
            return self._lm.start(work.token_ids, work.members[0].cache, work.start)
        return self._lm.start_batch(work.token_ids, [s.cache for s in work.members])

    def _finish(self, work: _Work, forward: Forward) -> None:
        logits = self._lm.logits_of(forward)
        for row, sequence in enumerate(work.members):
            if sequence.pending is work:  # else it was dropped meanwhile
                sequence.num_tokens += 1
                sequence.logits, sequence.pending = logits[row], None

    def _may_leave(self, forward: Forward) -> bool:
        return True

    def _may_leave_between(self) -> bool:
        return True


def _prompt_works(sequence: Computed, token_ids: Sequence[int], size: int) -> Iterator[_Work]:
    for start in range(0, len(token_ids), size):
        yield _Work([sequence], token_ids[start : start + size], start)


def _batches(
    fresh: Sequence[tuple[Computed, int]], free_keys: int
) -> list[list[tuple[Computed, int]]]:
    """Sequences of like lengths together, as each costs what the longest one does: a batch reads at
    most twice the keys that are there, or free_keys more."""
    batches: list[list[tuple[Computed, int]]] = []
    total = 0
    for one in sorted(fresh, key=lambda member: member[0].num_tokens):
        longest = one[0].num_tokens
        total += longest
        padded = (len(batches[-1]) + 1) * longest if batches else 0
        if batches and padded <= max(2 * total, total + free_keys):
            batches[-1].append(one)
        else:
            batches.append([one])
            total = longest
    return batches
