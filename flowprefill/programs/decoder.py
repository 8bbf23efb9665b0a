"""The native program: a decoder of the Llama kind, in slices.

DecoderProgram holds what all passes share; DecoderState is one pass. A parked pass holds its
residual stream, the queries of the tile it stopped in (in op order: of all rows), and its KV
blocks, nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flowprefill.granularity import Granularity
from flowprefill.kv.cache import KVCache
from flowprefill.ops.attention import paged_attention, query_scale
from flowprefill.ops.linear import Linear
from flowprefill.ops.mlp import silu_and_mul
from flowprefill.ops.rmsnorm import rmsnorm
from flowprefill.ops.rope import RotaryTable
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import SequenceInput, SliceCost
from flowprefill.programs.rope_frequencies import rope_frequencies
from flowprefill.programs.slices import (
    Group,
    PassPlan,
    Slice,
    SliceLimits,
    Span,
    plan_decode,
    plan_prefill,
)
from flowprefill.programs.weights import DecoderWeights, LayerWeights


class DecoderProgram:
    """Operators of one model, with its weights packed for the device."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache, limits: SliceLimits
    ) -> None:
        self.spec = spec
        self.cache = cache
        self.limits = limits
        self.device = weights.embed.device
        self.embed = weights.embed
        self.norm = weights.norm
        self.layers = [_Layer(w) for w in weights.layers]
        self.lm_head = Linear(weights.lm_head)
        self.rotary = RotaryTable(rope_frequencies(spec), spec.max_position_embeddings, self.device)
        self.query_scale = query_scale(spec.head_dim)

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> DecoderState:
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

    def decode(self, inputs: Sequence[SequenceInput]) -> DecoderState:
        """Start a decode step: one token of each sequence."""
        spans = [Span(i.start, i.start + 1) for i in inputs]
        plan = plan_decode([s.end for s in spans], self.limits)
        return DecoderState(self, inputs, [(spans, plan)])


class _Layer:
    """One layer's weights, packed."""

    def __init__(self, weights: LayerWeights) -> None:
        self.input_norm = weights.input_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.o_proj = Linear(weights.o_proj)
        self.post_norm = weights.post_norm
        self.gate_up = Linear(weights.gate_up)
        self.down = Linear(weights.down)


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
        if self._layer == num_layers - 1:
            return self._last_layer_s[self._index] + self._later_passes_s
        layers_between_s = (num_layers - 2 - self._layer) * self._layer_s[0]
        this_layer_s = self._layer_s[self._index]
        return this_layer_s + layers_between_s + self._last_layer_s[0] + self._later_passes_s

    @torch.inference_mode()
    def run_slice(self) -> bool:
        """Run the next slice. True if the task may be left here (never when it is done)."""
        piece = self.next_slice
        if piece.group is Group.QKV:
            self._run_qkv(piece)
        elif piece.group is Group.ATTENTION:
            self._run_attention(piece)
        elif piece.group is Group.MLP:
            self._run_mlp(piece)
        elif piece.group is Group.HEAD:
            self._run_head()
        else:
            self._run_logits(self._hidden)
        return self._advance(piece)

    def _slices(self) -> tuple[Slice, ...]:
        plan = self._passes[self._pass][1]
        is_last = self._layer == self._program.spec.num_layers - 1
        return plan.last_layer if is_last else plan.layer

    def _advance(self, done: Slice) -> bool:
        """Move the cursor behind `done`. True if the task may be left there."""
        if self.is_done:
            return False
        self._index += 1
        if self._index == len(self._slices()):
            self._index = 0
            self._layer += 1
        if self._layer == self._program.spec.num_layers:
            self._begin_next_pass()
            return True  # between two chunks
        return done.is_boundary

    def _begin_next_pass(self) -> None:
        """Rows of the next pass: positions, slots and the embedded tokens."""
        self._pass += 1
        self._layer = self._index = 0
        spans, plan = self._passes[self._pass]
        device = self._program.device
        tokens: list[int] = []
        positions, slots = [], []
        for span, sequence in zip(spans, self._inputs, strict=True):
            tokens += sequence.token_ids[span.start - sequence.start : span.end - sequence.start]
            positions.append(torch.arange(span.start, span.end, device=device))
            slots.append(sequence.table.slots(span.start, span.end))
        self._positions = torch.cat(positions)
        self._slots = torch.cat(slots)
        self._hidden = self._program.embed[torch.tensor(tokens, device=device)]
        # Queries live from a QKV slice to the MLP slice of the same rows: those of one tile, or in
        # op order those of all rows.
        widest = max(s.num_rows for s in plan.layer if s.group is Group.QKV)
        self._q_row0 = 0
        rows = len(tokens) if self._in_op_order else widest
        self._q = self._hidden.new_empty(rows, self._program.spec.q_size)

    def _queries(self, start: int, end: int) -> Tensor:
        """Queries of rows start..end, [rows, q_size]; attention's output overwrites them."""
        return self._q[start - self._q_row0 : end - self._q_row0]

    def _run_qkv(self, piece: Slice) -> None:
        rows = slice(piece.start, piece.end)
        if not self._in_op_order:
            self._q_row0 = piece.start
        q = self._project(self._hidden[rows], self._positions[rows], self._slots[rows])
        self._queries(piece.start, piece.end).copy_(q)

    def _project(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Norm, qkv, rope; K and V go into the cache. Returns scaled queries [rows, q_size]."""
        program, spec = self._program, self._program.spec
        layer = program.layers[self._layer]
        qkv = layer.qkv(rmsnorm(hidden, layer.input_norm, spec.rms_norm_eps))
        qk, v = qkv.split([spec.q_size + spec.kv_size, spec.kv_size], dim=-1)
        qk = qk.view(-1, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
            q = rmsnorm(q, layer.q_norm, spec.rms_norm_eps)
            k = rmsnorm(k, layer.k_norm, spec.rms_norm_eps)
            qk = torch.cat([q, k], dim=1)
        qk = program.rotary.apply(qk.float(), positions)
        q, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
        v = v.view(-1, spec.num_kv_heads, spec.head_dim)
        program.cache.write(self._layer, slots, k, v)
        scaled: Tensor = q.mul(program.query_scale).reshape(-1, spec.q_size)
        return scaled.to(hidden.dtype)

    def _run_attention(self, piece: Slice) -> None:
        q = self._queries(piece.start, piece.end)
        if piece.sequence is None:
            q.copy_(self._attend_one_row_each(q, range(piece.start, piece.end)))
        else:
            q.copy_(self._attend(q.unsqueeze(0), [piece.sequence], [piece.position])[0])

    def _attend(self, q: Tensor, sequences: Sequence[int], first: Sequence[int]) -> Tensor:
        """q: [seqs, rows, q_size]; returns the same shape."""
        spec, cache = self._program.spec, self._program.cache
        out = paged_attention(
            q.view(*q.shape[:2], spec.num_heads, spec.head_dim),
            cache.k[self._layer],
            cache.v[self._layer],
            [self._inputs[s].table for s in sequences],
            first,
        )
        return out.view(q.shape)

    def _attend_one_row_each(self, q: Tensor, sequences: range) -> Tensor:
        """q: [len(sequences), q_size], of the last token of this pass of each sequence."""
        spans, _ = self._passes[self._pass]
        order = sorted(sequences, key=lambda i: -spans[i].end)
        rows = [i - sequences.start for i in order]
        out = torch.empty_like(q)
        last = [spans[i].end - 1 for i in order]
        out[rows] = self._attend(q[rows].unsqueeze(1), order, last)[:, 0]
        return out

    def _run_mlp(self, piece: Slice) -> None:
        rows = slice(piece.start, piece.end)
        attended = self._queries(piece.start, piece.end)
        self._hidden[rows] = self._finish_layer(self._hidden[rows], attended)

    def _finish_layer(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and gated MLP, each with its residual."""
        layer = self._program.layers[self._layer]
        hidden = hidden + layer.o_proj(attended)
        normed = rmsnorm(hidden, layer.post_norm, self._program.spec.rms_norm_eps)
        hidden += layer.down(silu_and_mul(layer.gate_up(normed)))
        return hidden

    def _run_head(self) -> None:
        """The last layer and the logits, for the last row of each sequence."""
        spans, _ = self._passes[self._pass]
        lengths = torch.tensor([s.end - s.start for s in spans], device=self._hidden.device)
        last = lengths.cumsum(0) - 1
        hidden = self._hidden[last]
        q = self._project(hidden, self._positions[last], self._slots[last])
        attended = self._attend_one_row_each(q, range(len(spans)))
        self._run_logits(self._finish_layer(hidden, attended))

    def _run_logits(self, hidden: Tensor) -> None:
        """hidden: [seqs, hidden], behind the last layer."""
        normed = rmsnorm(hidden, self._program.norm, self._program.spec.rms_norm_eps)
        self._logits = self._program.lm_head(normed).float()


def _sums_to_end(values: Iterable[float]) -> list[float]:
    """The sum of each value and all behind it."""
    return list(itertools.accumulate(reversed(list(values))))[::-1]
