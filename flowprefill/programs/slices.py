"""Which slices one pass over some token rows consists of. Pure: no torch.

Slice edges are constants of the model, the device class and the absolute token position. Neither
load nor calibration moves them, so a run that was parked does the same arithmetic as another.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowprefill.granularity import Granularity
from flowprefill.programs.model_spec import ModelSpec

MAX_TILE_ROWS = 8192
_MLP_SLICES = 4
"""MLP slices of one tile at most."""
MIN_PRODUCT_ROWS = 16
"""Rows for which attention of a single row costs (ops/attention.py pads to them)."""


class Group(enum.Enum):
    """Operators that run without a boundary between them."""

    QKV = "qkv"  # norm, qkv projection, rope, K and V into the cache
    ATTENTION = "attention"
    MLP = "mlp"  # output projection, residual, norm, gated MLP, residual
    LAYERS = "layers"  # of a decode step: all three of some layers, if there are few keys
    HEAD = "head"  # of a prefill: the last layer and the logits, for each sequence's last row
    LOGITS = "logits"  # of a decode step


@dataclass(frozen=True)
class Slice:
    """The work between two boundaries: one operator group on a range of rows of the pass."""

    group: Group
    start: int
    end: int
    """Rows start..end of the pass."""
    sequence: int | None = None
    """Attention of a prefill: the (first) sequence that the rows belong to; None = each row is its
    own."""
    position: int = 0
    """Attention of a prefill: token position of row `start`; of several sequences the mean."""
    num_keys: int = 0
    """Keys that a row reads at most (prefill; of several sequences the mean), or that all rows read
    together (decode)."""
    num_layers: int = 1
    """LAYERS: how many."""
    is_boundary: bool = False
    """The task may be left after this slice."""
    num_sequences: int = 1
    """Attention of a prefill: from `sequence` on."""

    @property
    def num_rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class KeyTiles:
    """How attention cuts the keys: at some edges, then evenly."""

    first_edges: tuple[int, ...]
    """Ends of the first tiles; all later ones are as wide as `width`, from the last edge on."""
    width: int

    def end(self, num_keys: int) -> int:
        """Keys of the tiles that cover positions 0..num_keys."""
        for edge in self.first_edges:
            if num_keys <= edge:
                return edge if num_keys > 0 else 0
        return -(-num_keys // self.width) * self.width

    def start(self, position: int) -> int:
        """Where the tile that holds `position` starts."""
        if not self.first_edges or position >= self.first_edges[-1]:
            return position // self.width * self.width
        return max((edge for edge in self.first_edges if edge <= position), default=0)


TORCH_KEY_TILES = KeyTiles((128, 512, 1024), 1024)
"""Of ops/attention.py; a test holds them to it, which needs torch."""
NATIVE_KEY_TILES = KeyTiles((), 64)
"""Of native/src/attention.h."""


@dataclass(frozen=True)
class SliceLimits:
    """How many rows a slice may have, so that it lasts about max_slice."""

    tile_rows: int
    """Rows of a QKV slice; tile edges are its multiples in token positions."""
    attention_work: int
    """Query rows x keys of an attention slice."""
    mlp_rows: int | None = None
    """Rows of an MLP slice, counted from the start of its tile; None = those of the tile."""
    key_tiles: KeyTiles = TORCH_KEY_TILES
    decode_bytes: int = 0
    """Weights and cache that a slice of some layers of a decode step reads; one layer at least."""
    layer_bytes: int = 1
    """Weights of a layer."""
    key_bytes: int = 0
    """K and V of one token in one layer."""
    packs_attention: bool = False
    """One attention slice may be of several sequences of a prefill."""

    @staticmethod
    def for_device(
        spec: ModelSpec,
        max_slice_s: float,
        linear_flops: float,
        attention_flops: float,
        bytes_per_s: float,
        value_bytes: int,
        key_tiles: KeyTiles = TORCH_KEY_TILES,
        packs_attention: bool = False,
    ) -> SliceLimits:
        """From the class's rates: FLOP/s of products and of attention, bytes read per second.

        value_bytes: of one weight, and of one value of K or V
        """
        mlp_weights = spec.hidden_size * (spec.q_size + 3 * spec.intermediate_size)
        mlp_rows = _floor_to(max_slice_s * linear_flops / (2 * mlp_weights), 64, MAX_TILE_ROWS)
        qkv_weights = spec.hidden_size * (spec.q_size + 2 * spec.kv_size)
        qkv_rows = max_slice_s * linear_flops / (2 * qkv_weights)
        return SliceLimits(
            # whole MLP slices; few, as a parked prefill keeps the queries of a tile
            tile_rows=_floor_to(qkv_rows, mlp_rows, min(_MLP_SLICES * mlp_rows, MAX_TILE_ROWS)),
            mlp_rows=mlp_rows,
            attention_work=int(max_slice_s * attention_flops / (4 * spec.q_size)),
            key_tiles=key_tiles,
            # half: a step of many rows computes more than it reads
            decode_bytes=int(max_slice_s / 2 * bytes_per_s),
            layer_bytes=(mlp_weights + qkv_weights) * value_bytes,
            key_bytes=2 * spec.kv_size * value_bytes,
            packs_attention=packs_attention,
        )

    def decode_layers(self, num_keys: int) -> int:
        """Layers of one slice of a decode step over num_keys keys of all sequences."""
        return max(1, self.decode_bytes // (self.layer_bytes + num_keys * self.key_bytes))

    def attention_rows(self, num_keys: int) -> int:
        """Query rows of an attention slice that reads up to num_keys keys."""
        return _floor_to(self.attention_work / num_keys, 16, self.tile_rows)


def _floor_to(value: float, step: int, largest: int) -> int:
    return max(step, min(largest, int(value) // step * step))


@dataclass(frozen=True)
class Span:
    """Token positions start..end of one sequence, computed in one pass."""

    start: int
    end: int


@dataclass(frozen=True)
class PassPlan:
    """The slices of one pass: `layer` for every layer, or group of layers, but the last, then
    `last_layer`."""

    layer: tuple[Slice, ...]
    last_layer: tuple[Slice, ...]
    group_layers: int = 1
    """Layers of a group; the last one has what remains."""

    def num_groups(self, num_layers: int) -> int:
        return -(-num_layers // self.group_layers)

    def total_s(self, cost: Callable[[Slice], float], num_layers: int) -> float:
        """Seconds of the whole pass, by the seconds of a slice."""
        num_before = self.num_groups(num_layers) - 1
        return num_before * sum(map(cost, self.layer)) + sum(map(cost, self.last_layer))


def plan_prefill(
    spans: Sequence[Span], limits: SliceLimits, granularity: Granularity, is_final: bool
) -> PassPlan:
    """Slices of a pass over the prompts' spans, packed one behind the other.

    is_final: the pass ends with the prompts' last tokens, so it ends with their logits.
    """
    tiles = _tiles(spans, limits.tile_rows)
    qkv = [Slice(Group.QKV, tile[0].start, tile[-1].end) for tile in tiles]
    attention = [_attention_of_tile(tile, limits) for tile in tiles]
    mlp = [_mlp_parts(s, limits) for s in qkv]
    if granularity.kind == "op":  # each operator over the whole prompt before the next
        layer = [*qkv, *itertools.chain(*attention), *itertools.chain(*mlp)]
    else:
        layer = [s for a, b, c in zip(qkv, attention, mlp, strict=True) for s in (a, *b, *c)]
    last = list(qkv)
    if is_final:
        num_rows = sum(span.end - span.start for span in spans)
        last.append(Slice(Group.HEAD, 0, num_rows, num_keys=sum(span.end for span in spans)))
    return PassPlan(_mark(layer, granularity), _mark(last, granularity))


def plan_decode(contexts: Sequence[int], limits: SliceLimits, num_layers: int) -> PassPlan:
    """Slices of one decode step, one row for each sequence.

    contexts: tokens of each sequence in the cache, the new one included. A step may be left after
    each slice, whatever the granularity of prefills.
    """
    rows = Slice(Group.QKV, 0, len(contexts), is_boundary=True)
    num_keys = sum(contexts)
    if num_keys <= max_decode_keys(limits):
        count = min(num_layers, limits.decode_layers(num_keys))
        group = replace(rows, group=Group.LAYERS, num_keys=num_keys, num_layers=count)
        rest = replace(group, num_layers=(num_layers - 1) % count + 1)
        return PassPlan((group,), (rest, replace(rows, group=Group.LOGITS)), count)
    steps = (rows, *_decode_attention_parts(contexts, limits), replace(rows, group=Group.MLP))
    return PassPlan(steps, (*steps, replace(rows, group=Group.LOGITS)))


def max_decode_keys(limits: SliceLimits) -> int:
    """Keys that the rows of one slice of a decode step read together."""
    return limits.attention_work // MIN_PRODUCT_ROWS


def _decode_attention_parts(contexts: Sequence[int], limits: SliceLimits) -> list[Slice]:
    """Cut the sequences so that the keys of one slice stay within limits; one sequence at least."""
    max_keys = max_decode_keys(limits)
    parts = [Slice(Group.ATTENTION, 0, 0, is_boundary=True)]
    for row, num_keys in enumerate(contexts):
        last = parts[-1]
        if last.num_rows and last.num_keys + num_keys > max_keys:
            parts.append(replace(last, start=row, end=row + 1, num_keys=num_keys))
        else:
            parts[-1] = replace(last, end=row + 1, num_keys=last.num_keys + num_keys)
    return parts


@dataclass(frozen=True)
class _Piece:
    """Rows of one tile that belong to one sequence."""

    start: int
    end: int
    sequence: int
    position: int  # token position of row `start`


def _tiles(spans: Sequence[Span], tile_rows: int) -> list[list[_Piece]]:
    """Cut spans at multiples of tile_rows in token positions; pack small pieces into one tile."""
    tiles: list[list[_Piece]] = []
    row = 0
    for sequence, span in enumerate(spans):
        position = span.start
        while position < span.end:
            edge = min(span.end, (position // tile_rows + 1) * tile_rows)
            piece = _Piece(row, row + edge - position, sequence, position)
            if tiles and piece.end - tiles[-1][0].start <= tile_rows:
                tiles[-1].append(piece)
            else:
                tiles.append([piece])
            row, position = piece.end, edge
    return tiles


def _attention_of_tile(tile: Sequence[_Piece], limits: SliceLimits) -> list[Slice]:
    """Attention slices of one tile, in the order of its rows."""
    parts = [part for piece in tile for part in _attention_parts(piece, limits)]
    if not limits.packs_attention:
        return parts
    packs: list[list[Slice]] = []
    for part in parts:
        if packs and _fits(packs[-1], part, limits):
            packs[-1].append(part)
        else:
            packs.append([part])
    return [_joined(pack) for pack in packs]


def _fits(pack: Sequence[Slice], part: Slice, limits: SliceLimits) -> bool:
    """Whether another sequence's part may share their slice."""
    work = sum(p.num_rows * p.num_keys for p in (*pack, part))
    return pack[-1].sequence != part.sequence and work <= limits.attention_work


def _joined(pack: Sequence[Slice]) -> Slice:
    """One slice of all their rows, which costs what they cost: so rows x keys is kept."""
    if len(pack) == 1:
        return pack[0]
    num_rows = sum(p.num_rows for p in pack)
    return replace(
        pack[0],
        end=pack[-1].end,
        num_sequences=len(pack),
        position=sum(p.num_rows * p.position for p in pack) // num_rows,
        num_keys=-(-sum(p.num_rows * p.num_keys for p in pack) // num_rows),
    )


def _attention_parts(piece: _Piece, limits: SliceLimits) -> list[Slice]:
    """Cut a piece so that rows x keys stays within limits; edges at fixed token positions."""
    last_position = piece.position + piece.end - piece.start
    tile_end = -(-last_position // limits.tile_rows) * limits.tile_rows
    rows = limits.attention_rows(tile_end)
    offset = piece.position - piece.start  # token position = row + offset
    parts = []
    position = piece.position
    while position < last_position:
        edge = min(last_position, (position // rows + 1) * rows)
        parts.append(
            Slice(Group.ATTENTION, position - offset, edge - offset, piece.sequence, position, edge)
        )
        position = edge
    return parts


def _mlp_parts(tile: Slice, limits: SliceLimits) -> list[Slice]:
    rows = limits.mlp_rows or limits.tile_rows
    edges = [*range(tile.start, tile.end, rows), tile.end]
    return [Slice(Group.MLP, start, end) for start, end in itertools.pairwise(edges)]


def _mark(slices: Sequence[Slice], granularity: Granularity) -> tuple[Slice, ...]:
    """Mark where a task of this granularity may be left."""
    if granularity.kind == "tile":
        return tuple(replace(s, is_boundary=True) for s in slices)
    if granularity.kind == "op":
        groups = [list(g) for _, g in itertools.groupby(slices, key=lambda s: s.group)]
        return tuple(s for g in groups for s in (*g[:-1], replace(g[-1], is_boundary=True)))
    if granularity.kind == "layer":
        return (*slices[:-1], replace(slices[-1], is_boundary=True))
    return tuple(slices)  # whole: nowhere; chunk: after the pass, which the state knows
