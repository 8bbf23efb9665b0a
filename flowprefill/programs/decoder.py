"""The native program: a decoder of the Llama kind, in slices.

DecoderProgram holds what all passes share; DecoderState is one pass. A parked pass holds its
residual stream, the queries of the tile it stopped in (in op order: of all rows), and its KV
blocks, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.kv.host_copies import to_device
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.operators import Attended, Operators, Rows, SliceRun, slice_ends
from flowprefill.programs.program import ProgramState, SequenceInput, SliceCost
from flowprefill.programs.slices import (
    Group,
    PassPlan,
    Slice,
    SliceLimits,
    Span,
    plan_decode,
    plan_prefill,
)


class DecoderProgram:
    """One model's operators, and how its passes are cut into slices."""

    def __init__(self, spec: ModelSpec, operators: Operators, limits: SliceLimits) -> None:
        self.spec = spec
        self.operators = operators
        self.limits = limits

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> ProgramState:
        """Start the prefill of one or several prompts, packed. Several are one pass, not chunks."""
        lengths = [i.start + len(i.token_ids) for i in inputs]
        if granularity.kind == "chunk" and len(inputs) == 1:
            start, end, size = inputs[0].start, lengths[0], granularity.chunk_tokens
            edges = [start, *range((start // size + 1) * size, end, size), end]
            pass_spans = [[Span(low, high)] for low, high in itertools.pairwise(edges)]
        else:
            pass_spans = [[Span(i.start, n) for i, n in zip(inputs, lengths, strict=True)]]
        passes = []
        for spans in pass_spans:
            is_final = spans is pass_spans[-1]
            passes.append((spans, plan_prefill(spans, self.limits, granularity, is_final)))
        return DecoderState(self, inputs, passes, in_op_order=granularity.kind == "op")

    def decode(self, inputs: Sequence[SequenceInput]) -> ProgramState:
        """Start a decode step: one token of each sequence."""
        spans = [Span(i.start, i.start + 1) for i in inputs]
        plan = plan_decode([s.end for s in spans], self.limits, self.spec.num_layers)
        return DecoderState(self, inputs, [(spans, plan)])


class DecoderState:
    """One forward pass of a DecoderProgram in progress. Implements ProgramState."""

    def __init__(
        self,
        program: DecoderProgram,
        inputs: Sequence[SequenceInput],
        passes: Sequence[tuple[Sequence[Span], PassPlan]],
        in_op_order: bool = False,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._passes = passes
        self._in_op_order = in_op_order
        self._pass = -1
        self._layer = 0
        self._index = 0  # cursor: the next slice of the layer's plan
        self._logits: Tensor | None = None
        self._sums_key: object = None  # what the sums of remaining_s were made for
        self._begin_next_pass()

    @property
    def is_done(self) -> bool:
        return self._logits is not None

    @property
    def logits(self) -> Tensor:
        assert self._logits is not None, "the pass is not done"
        return self._logits

    @property
    def next_slice(self) -> Slice:
        return self._slices()[self._index]

    @property
    def live_bytes(self) -> int:
        return self._hidden.nbytes + self._q.nbytes

    def remaining_s(self, cost: SliceCost) -> float:
        """Sum over the slices still to run; later layers repeat the plan of this one.

        The sums are kept, so asking again in the same pass takes no time while `cost` stays what it
        was: the same function, with the same answer for the pass's first slice.
        """
        if self.is_done:
            return 0.0
        num_layers = self._program.spec.num_layers
        plan = self._passes[self._pass][1]
        key = self._pass, cost, cost(plan.layer[0])
        if self._sums_key != key:
            self._sums_key = key
            self._layer_s = _sums_to_end(map(cost, plan.layer))
            self._last_layer_s = _sums_to_end(map(cost, plan.last_layer))
            later = self._passes[self._pass + 1 :]
            self._later_passes_s = sum(plan.total_s(cost, num_layers) for _, plan in later)
        num_behind = plan.num_groups(num_layers) - 1 - self._layer // plan.group_layers
        if not num_behind:
            return self._last_layer_s[self._index] + self._later_passes_s
        layers_between_s = (num_behind - 1) * self._layer_s[0]
        this_layer_s = self._layer_s[self._index]
        return this_layer_s + layers_between_s + self._last_layer_s[0] + self._later_passes_s

    @torch.inference_mode()
    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        """Run the next slice. True if the task may be left here (never when it is done).

        interrupt: given, slices of the same operator behind it may run in the same call
        """
        piece, num_run = self.next_slice, 1
        operators = self._program.operators
        goes_on = interrupt is not None and operators.runs_several_slices
        if piece.group is Group.QKV:
            if not self._in_op_order:
                self._q_row0 = piece.start
            operators.qkv(self._layer, *self._views_of(piece))
        elif piece.group is Group.ATTENTION:
            q, attended, ends = self._views_of(piece, goes_on)
            run = SliceRun(ends, interrupt, may_leave=piece.is_boundary)
            num_run = operators.attention(self._layer, q, attended, run)
        elif piece.group is Group.MLP:
            hidden, q, ends = self._views_of(piece, goes_on)
            run = SliceRun(ends, interrupt, may_leave=piece.is_boundary)
            num_run = operators.mlp(self._layer, hidden, q, run)
        elif piece.group is Group.LAYERS:
            layers = range(self._layer, self._layer + piece.num_layers)
            operators.layers(layers, self._hidden, self._rows, self._q, self._one_row_each)
        elif piece.group is Group.HEAD:
            self._run_head()
        else:
            self._logits = operators.logits(self._hidden)
        return self._advance(num_run)

    def _slices(self) -> tuple[Slice, ...]:
        plan = self._passes[self._pass][1]
        is_last = self._layer + plan.group_layers >= self._program.spec.num_layers
        return plan.last_layer if is_last else plan.layer

    def _advance(self, num_run: int) -> bool:
        """Move the cursor behind the slices that ran. True if the task may be left there."""
        if self.is_done:
            return False
        self._index += num_run
        last = self._slices()[self._index - 1]
        if self._index == len(self._slices()):
            self._index = 0
            self._layer += self._passes[self._pass][1].group_layers
        if self._layer >= self._program.spec.num_layers:
            self._begin_next_pass()
            return True  # between two chunks
        return last.is_boundary

    def _begin_next_pass(self) -> None:
        """Rows of the next pass: positions, slots and the embedded tokens."""
        self._pass += 1
        self._layer = self._index = 0
        spans, plan = self._passes[self._pass]
        tokens: list[int] = []
        for span, sequence in zip(spans, self._inputs, strict=True):
            tokens += sequence.token_ids[span.start - sequence.start : span.end - sequence.start]
        self._rows = self._find_rows(spans)
        self._hidden = self._program.operators.embed(tokens)
        # Queries live from a QKV slice to the MLP slice of the same rows: those of one tile, or in
        # op order, and in a decode step, those of all rows.
        tiles = [s.num_rows for s in plan.layer if s.group is Group.QKV]
        self._q_row0 = 0
        rows = len(tokens) if self._in_op_order else max(tiles, default=len(tokens))
        self._q = self._hidden.new_empty(rows, self._program.spec.q_size)
        self._views: dict[tuple[int, bool], tuple[Any, ...]] = {}

    def _find_rows(self, spans: Sequence[Span]) -> Rows:
        tables = [i.table for i in self._inputs]
        device = tables[0].ids.device
        if all(span.end - span.start == 1 for span in spans):  # a decode step: no time to lose
            slots = [t.slot(s.start) for t, s in zip(tables, spans, strict=True)]
            positions = [s.start for s in spans]
            return Rows(*to_device([positions, slots], device))
        ranges = [torch.arange(s.start, s.end, device=device) for s in spans]
        slot_ranges = [t.slots(s.start, s.end) for t, s in zip(tables, spans, strict=True)]
        return Rows(torch.cat(ranges), torch.cat(slot_ranges))

    def _views_of(self, piece: Slice, goes_on: bool = False) -> tuple[Any, ...]:
        """What the operator works on. Kept, as all layers have the same slices: between two slices
        of a long prompt the processor would find this code cold (docs/log.md).

        piece: the slice at the cursor; goes_on: and those behind it that one call may run
        """
        key = id(piece), goes_on
        views = self._views.get(key)
        if views is None:
            pieces = self._same_operator() if goes_on else [piece]
            rows = slice(piece.start, pieces[-1].end)
            queries = self._q[rows.start - self._q_row0 : rows.stop - self._q_row0]
            assert len(queries) == rows.stop - rows.start  # kernels trust the slices' ends
            if piece.group is Group.QKV:
                views = self._hidden[rows], self._rows[rows], queries
            else:
                ends = slice_ends(p.end - piece.start for p in pieces)
                if piece.group is Group.ATTENTION:
                    views = queries, self._attended(piece), ends
                else:
                    views = self._hidden[rows], queries, ends
            self._views[key] = views
        return views

    def _same_operator(self) -> list[Slice]:
        """Slices from the cursor on that need nothing but each other's end, on consecutive rows."""
        first, *others = self._slices()[self._index :]
        found = [first]
        for piece in others:
            if (piece.group, piece.sequence) != (first.group, first.sequence):
                break
            if first.group is Group.ATTENTION and first.sequence is None:
                break  # each row reads keys of its own
            found.append(piece)
        return found

    def _attended(self, piece: Slice) -> Attended:
        """Whose keys the rows of an attention slice read."""
        if piece.sequence is not None:
            return self._attended_by_prompts(piece, piece.sequence)
        rows, each = slice(piece.start, piece.end), self._one_row_each
        return Attended(each.tables[rows], each.first[rows], is_newest=True)

    def _attended_by_prompts(self, piece: Slice, first: int) -> Attended:
        """first: the sequence of its first row"""
        sequences = range(first, first + piece.num_sequences)
        tables = [self._inputs[i].table for i in sequences]
        if len(sequences) == 1:
            return Attended(tables, [piece.position])
        spans, _ = self._passes[self._pass]
        row = sum(s.end - s.start for s in spans[:first])
        positions, num_rows = [], []
        for span in spans[first : sequences.stop]:
            end = row + span.end - span.start
            start = max(row, piece.start)
            positions.append(span.start + start - row)
            num_rows.append(min(end, piece.end) - start)
            row = end
        return Attended(tables, positions, num_rows=num_rows)

    @cached_property
    def _one_row_each(self) -> Attended:
        """The last token of each sequence; not for chunks, whose last token is another each."""
        spans, _ = self._passes[-1]
        tables = [i.table for i in self._inputs]
        return Attended(tables, [span.end - 1 for span in spans], is_newest=True)

    def _run_head(self) -> None:
        """The last layer and the logits, for the last row of each sequence."""
        spans, _ = self._passes[self._pass]
        ends = itertools.accumulate(s.end - s.start for s in spans)
        last = to_device([end - 1 for end in ends], self._hidden.device)
        hidden, rows = self._hidden[last], self._rows[last]
        q = self._q.new_empty(len(spans), self._q.shape[1])
        operators = self._program.operators
        layers = range(self._layer, self._layer + 1)
        operators.layers(layers, hidden, rows, q, self._one_row_each)
        self._logits = operators.logits(hidden)


def _sums_to_end(values: Iterable[float]) -> list[float]:
    """The sum of each value and all behind it."""
    return list(itertools.accumulate(reversed(list(values))))[::-1]
