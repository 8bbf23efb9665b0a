"""The part of a model that one of several ranks computes.

As in Megatron-LM (arXiv 1909.08053, section 3): attention heads and the inner dimension of the MLP
are divided: rows of q, k, v, gate and up, and columns of the output and down projections, whose
products are then parts of a sum over the ranks. Norms, embedding and LM head are whole on each
rank, so each could choose the token; rank 0 does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from flowprefill.errors import ConfigError
from flowprefill.programs.checkpoint import Checkpoint
from flowprefill.programs.family import ModelSpec, TensorNames

_DIVIDED = ("num_heads", "num_kv_heads", "intermediate_size")


@dataclass(frozen=True)
class Shard:
    """Which part."""

    rank: int = 0
    num_ranks: int = 1

    def of_spec(self, spec: ModelSpec) -> ModelSpec:
        """What this rank computes of a model. Raises ConfigError if it cannot be divided."""
        for name in _DIVIDED:
            size = getattr(spec, name)
            if size % self.num_ranks:
                raise ConfigError(
                    f"model.json: tensor_parallel_size={self.num_ranks}: must divide the model's "
                    f"{name}={size}"
                )
        return replace(spec, **{n: getattr(spec, n) // self.num_ranks for n in _DIVIDED})

    def part(self, size: int) -> slice:
        """Of a dimension that is divided."""
        each = size // self.num_ranks
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()


class ShardedCheckpoint:
    """A checkpoint as one rank sees it: divided tensors have the rank's shape. Implements
    Checkpoint. Reads no row that the rank does not need."""

    def __init__(
        self, checkpoint: Checkpoint, names: TensorNames, num_layers: int, shard: Shard
    ) -> None:
        self.names = checkpoint.names
        self._checkpoint = checkpoint
        self._shard = shard
        by_rows = (names.q, names.k, names.v, *(names.qkv_bias or ()), names.gate, names.up)
        layers = range(num_layers)
        self._dimensions = {name.format(i): 0 for name in by_rows for i in layers}
        self._dimensions |= {name.format(i): 1 for name in (names.o, names.down) for i in layers}

    def shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._checkpoint.shape(name))
        dimension = self._dimensions.get(name, len(shape))
        # what has another shape than it should, or is not divisible, is refused as it is
        if dimension < len(shape) and shape[dimension] % self._shard.num_ranks == 0:
            shape[dimension] //= self._shard.num_ranks
        return tuple(shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        dimension = self._dimensions.get(name)
        if dimension is None:
            return self._checkpoint.read_rows(name, start, stop)
        part = self._shard.part(self._checkpoint.shape(name)[dimension])
        if dimension == 0:
            return self._checkpoint.read_rows(name, part.start + start, part.start + stop)
        return self._checkpoint.read_rows(name, start, stop)[:, part]
