"""Decode steps as CUDA graphs: all kernels of a layer are launched as one.

The kernels of a decode step are short and many: launching them one by one takes longer than running
them. So a graph of each layer is recorded at load for each bucket, a number of rows and of keys,
and a slice of a step replays those of its layers: slices are the same, and a step can be left at
their ends as ever. Between slices a step's rows are in its own tensors; graphs work on rows at
fixed places, which are copied there and back, so steps may take turns.

A slice takes the smallest bucket that holds it. The rows that are missing are zeros, attend to
themselves alone, and write K and V into a block of the cache that nobody owns.

Bits: our kernels compute each row alone, so padding changes nothing there. cuBLAS chooses the
kernel of a product by its number of rows, which now is the bucket's: a row has the same bits in all
steps of a bucket, whereas one of another bucket may differ, as steps of other sizes do without
graphs. What is claimed of a device (EngineInfo.bit_invariant) is probed with graphs in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.kv.host_copies import to_device
from flowprefill.programs.operators import Attended, Rows

MAX_ROWS = 128
"""Steps of more rows are launched kernel by kernel: these last longer than their launches."""
MAX_SPLITS = 1024
"""Splits of all rows together, for the same reason."""
_KEYS_STEP = 4
"""Between buckets of keys. Programs of splits that a step does not have end at once, but take part
in the launch."""

LaunchLayer: TypeAlias = Callable[[int, Tensor, Rows, Tensor, Attended], None]
"""Operators.layers of one layer."""


class Bucket(NamedTuple):
    """What a graph is recorded for, in order of preference."""

    num_rows: int
    num_keys: int
    """Of a row at most."""


def make_buckets(max_len: int, split: int, max_rows: int = MAX_ROWS) -> list[Bucket]:
    """max_len: keys of a row at most; split: keys that a program of attention takes"""
    num_keys = [split]
    while num_keys[-1] < max_len:
        num_keys.append(num_keys[-1] * _KEYS_STEP)
    num_keys[-1] = min(num_keys[-1], -(-max_len // split) * split)
    rows = [1 << i for i in range(max_rows.bit_length())]
    return [Bucket(n, k) for n in rows for k in num_keys if n * k <= MAX_SPLITS * split]


def choose_bucket(buckets: Sequence[Bucket], num_rows: int, num_keys: int) -> Bucket | None:
    """The first that holds them; None if none does."""
    fitting = (b for b in buckets if num_rows <= b.num_rows and num_keys <= b.num_keys)
    return next(fitting, None)


class Capturer(Protocol):
    """Records what is launched."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch`, whose kernels need not run meanwhile. Returns what has them run again."""
        ...


class CudaCapturer:
    """CUDA graphs that share their memory: no two of them run at the same time.

    On the thread's current stream, which is not the default one.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        # not torch.cuda.graph: it collects garbage and synchronises the device each time
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay


@dataclass(frozen=True)
class _FixedPlace(Attended):
    """Whoever is described in `sequences` when it is read; `first` says how many keys at most."""

    sequences: Tensor | None = None

    def placed(self, total: int) -> Tensor:
        assert self.sequences is not None and total == len(self.sequences)
        return self.sequences


class DecodeGraphs:
    """The graphs of one model, and the places they work on."""

    def __init__(
        self,
        launch_layer: LaunchLayer,
        num_layers: int,
        cache: KVCache,
        row_like: tuple[Tensor, Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        """row_like: a row of the residual stream [1, hidden] and of queries [1, q_size]"""
        most = max(bucket.num_rows for bucket in buckets)
        hidden, q = row_like
        self._launch_layer = launch_layer
        self._num_layers = num_layers
        self._buckets = sorted(buckets)
        self._hidden = hidden.new_zeros(most, hidden.shape[1])
        self._q = q.new_zeros(most, q.shape[1])
        # of a bucket of n rows: sequences [n, 4], positions [n], slots [n]
        self._table = torch.zeros(6 * most, dtype=torch.int64, device=hidden.device)
        # the first of the cache's padding blocks
        self._scratch = BlockTable([cache.num_blocks], cache.block_size, hidden.device)
        self._graphs: dict[tuple[Bucket, int], Callable[[], None]] = {}
        self._described: tuple[Attended, Tensor] | None = None

    @torch.inference_mode()
    def record(self, capturer: Capturer) -> None:
        """Record all graphs. Raises what launching or recording raises."""
        for bucket in self._buckets:
            n = bucket.num_rows
            self._table[: 6 * n].copy_(self._describe(Attended((), ()), n))
            self._hidden.zero_()
            rows = Rows(self._table[4 * n : 5 * n], self._table[5 * n : 6 * n])
            attended = _FixedPlace(
                [self._scratch] * n,
                [bucket.num_keys - 1] * n,
                is_newest=True,
                sequences=self._table[: 4 * n].view(n, 4),
            )
            places = self._hidden[:n], rows, self._q[:n], attended
            # kernels are compiled and loaded, and libraries set up, before anything is recorded
            self._launch_layer(0, *places)
            for layer in range(self._num_layers):
                launch = partial(self._launch_layer, layer, *places)
                self._graphs[bucket, layer] = capturer.capture(launch)

    def run(self, layers: range, hidden: Tensor, attended: Attended) -> bool:
        """Operators.layers, where a bucket holds the rows; False and nothing done where none does.

        hidden: [num_rows, hidden], overwritten
        """
        num_rows = len(hidden)
        bucket = choose_bucket(self._buckets, num_rows, max(attended.first) + 1)
        if bucket is None:
            return False
        self._table[: 6 * bucket.num_rows].copy_(self._description(attended, bucket.num_rows))
        padded = self._hidden[: bucket.num_rows]
        padded[:num_rows].copy_(hidden)
        if num_rows < bucket.num_rows:  # what earlier steps left would grow with each layer
            padded[num_rows:].zero_()
        for layer in layers:
            self._graphs[bucket, layer]()
        hidden.copy_(padded[:num_rows])
        return True

    def _description(self, attended: Attended, num_rows: int) -> Tensor:
        """On the device; once for all slices of a step, which have the same bucket."""
        last = self._described
        if last is None or last[0] is not attended:
            last = self._described = attended, self._describe(attended, num_rows)
        return last[1]

    def _describe(self, attended: Attended, num_rows: int) -> Tensor:
        """What goes into the table: [6 * num_rows] int64."""
        num_missing = num_rows - len(attended.tables)
        scratch = self._scratch
        addresses = [*attended.addresses.tables, *[scratch.ids.data_ptr()] * num_missing]
        positions = [*attended.first, *[0] * num_missing]
        tables = [*attended.tables, *[scratch] * num_missing]
        slots = [table.slot(p) for table, p in zip(tables, positions, strict=True)]
        sequences: list[int] = []
        for row, (address, position) in enumerate(zip(addresses, positions, strict=True)):
            sequences += (address, position, row, row + 1)
        return to_device([*sequences, *positions, *slots], self._table.device)
