"""PassSeconds: profiled seconds of whole prefill passes, quick at any length. Pure.

The slices of a whole tile of one prompt depend on its position alone, so the seconds of whole tiles
are kept as running sums, and within each tile those of its attention parts. Both grow when a longer
prompt first asks. A pass over any prompts comes out as the sum over its plan (plan_prefill), whose
slices are added up one by one only at the ragged ends of a prompt.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flowprefill.granularity import Granularity
from flowprefill.programs.slices import Group, Slice, SliceLimits, Span, plan_prefill

_WHOLE = Granularity("whole")
"""Boundaries do not matter here."""


@dataclass(frozen=True)
class _Parts:
    """Attention of one whole tile of a prompt."""

    edges: Sequence[int]
    """Token positions between which its slices lie; a ragged piece of the tile is cut there too."""
    sums_s: Sequence[float]
    """Seconds of one layer up to each edge."""


class PassSeconds:
    """Seconds by a cost function that never changes its answers. Usable from any thread."""

    def __init__(
        self, cost: Callable[[Slice], float], num_layers: int, limits: SliceLimits
    ) -> None:
        self._cost = cost
        self._num_layers = num_layers
        self._limits = limits
        self._parts: dict[int, _Parts] = {}
        self._tiles = RunningSum(self._whole_tile_s)

    def prefill_pass_s(self, spans: Sequence[Span], is_final: bool) -> float:
        """A pass over the prompts' spans, packed; is_final as in plan_prefill."""
        tile_rows = self._limits.tile_rows
        total = 0.0
        open_rows = 0  # of the tile that the next small piece may join
        for span in spans:
            for start, end in self._pieces(span):
                num_rows = end - start
                if num_rows >= tile_rows:
                    total += self._tiles.between(start // tile_rows, end // tile_rows)
                else:
                    total += (self._num_layers - 1) * self._attention_s(start, end)
                    if open_rows + num_rows <= tile_rows:
                        open_rows += num_rows
                        continue
                total += self._rows_s(open_rows)
                open_rows = num_rows if num_rows < tile_rows else 0
        total += self._rows_s(open_rows)
        if is_final:
            rows = sum(span.end - span.start for span in spans)
            keys = sum(span.end for span in spans)
            total += self._cost(Slice(Group.HEAD, 0, rows, num_keys=keys))
        return total

    def _pieces(self, span: Span) -> Iterable[tuple[int, int]]:
        """Token positions of its ragged start, of all its whole tiles together, of the rest."""
        tile_rows = self._limits.tile_rows
        first = -(-span.start // tile_rows) * tile_rows
        last = max(first, span.end // tile_rows * tile_rows)
        edges = (span.start, min(first, span.end), min(last, span.end), span.end)
        return ((low, high) for low, high in pairwise(edges) if low < high)

    def _rows_s(self, num_rows: int) -> float:
        """QKV and MLP slices of one tile in all layers; the last one has no MLP slice."""
        if not num_rows:
            return 0.0
        qkv_s = self._cost(Slice(Group.QKV, 0, num_rows))
        most = self._limits.mlp_rows or self._limits.tile_rows
        num_whole, rest = divmod(num_rows, most)
        mlp_s = num_whole * self._cost(Slice(Group.MLP, 0, most)) if num_whole else 0.0
        mlp_s += self._cost(Slice(Group.MLP, 0, rest)) if rest else 0.0
        return qkv_s + (self._num_layers - 1) * (qkv_s + mlp_s)

    def _attention_s(self, start: int, end: int) -> float:
        """Attention of one layer for token positions within one tile."""
        parts = self._parts_of(start // self._limits.tile_rows)
        first = bisect_left(parts.edges, start)
        last = bisect_right(parts.edges, end) - 1
        if first > last:
            return self._part_s(start, end)
        total = parts.sums_s[last] - parts.sums_s[first]
        if start < parts.edges[first]:
            total += self._part_s(start, parts.edges[first])
        if parts.edges[last] < end:
            total += self._part_s(parts.edges[last], end)
        return total

    def _part_s(self, start: int, end: int) -> float:
        piece = Slice(Group.ATTENTION, 0, end - start, sequence=0, position=start, num_keys=end)
        return self._cost(piece)

    def _whole_tile_s(self, index: int) -> float:
        attention_s = (self._num_layers - 1) * self._parts_of(index).sums_s[-1]
        return attention_s + self._rows_s(self._limits.tile_rows)

    def _parts_of(self, tile: int) -> _Parts:
        found = self._parts.get(tile)
        if found is None:
            rows = self._limits.tile_rows
            span = Span(tile * rows, (tile + 1) * rows)
            plan = plan_prefill([span], self._limits, _WHOLE, is_final=False)
            parts = [s for s in plan.layer if s.group is Group.ATTENTION]
            edges = [span.start, *(s.num_keys for s in parts)]
            sums_s = list(accumulate(map(self._cost, parts), initial=0.0))
            found = self._parts[tile] = _Parts(edges, sums_s)
        return found


class RunningSum:
    """Sums of value(0), value(1), .. between two indices; each value is asked for once."""

    def __init__(self, value: Callable[[int], float]) -> None:
        self._value = value
        self._sums = [0.0]
        self._growing = threading.Lock()

    def between(self, first: int, last: int) -> float:
        """value(first) + .. + value(last - 1)."""
        if last >= len(self._sums):
            with self._growing:
                while last >= len(self._sums):
                    index = len(self._sums) - 1
                    self._sums.append(self._sums[index] + self._value(index))
        return self._sums[last] - self._sums[first]
