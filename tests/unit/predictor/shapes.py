"""Slices of all kinds in many sizes, and times of them whose truth is known."""

from __future__ import annotations

from collections.abc import Iterator

from flowprefill.granularity import Granularity
from flowprefill.predictor.features import slice_features, slice_kind
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.slices import Group, Slice, SliceLimits

LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 512)
"""Attention parts of a tile: one up to 512 keys, then ever more."""
NUM_LAYERS = 4
TRUTH = {
    "qkv": (50e-6, 3e-6, 0.0, 1e-6, 0.0, 0.0),
    "attention": (80e-6, 2e-6, 3e-7, 1e-7, 9e-9, 4e-9),
    "mlp": (60e-6, 8e-6, 1e-6, 0.0, 0.0, 0.0),
    "layers": (90e-6, 9e-6, 0.0, 2e-6, 0.0, 0.0, 0.1e-6),
    "head": (3e-3, 0.2e-6),
    "decode_attention": (100e-6, 5e-6, 2e-7, 0.5e-6),
    "logits": (1e-3, 0.2e-3, 0.0, 0.0, 0.0, 0.0),
}
"""Seconds per feature."""


def all_shapes() -> Iterator[Slice]:
    for rows in (1, 3, 16, 40, 64, 200, 700, 2000):
        yield Slice(Group.QKV, 0, rows)
        yield Slice(Group.MLP, 0, rows)
        yield Slice(Group.LOGITS, 0, rows)
        for start in (0, 100, 500, 1500, 5000):
            yield Slice(Group.ATTENTION, 0, rows, 0, start, start + rows)
            yield Slice(Group.ATTENTION, 0, rows, num_keys=rows * (start + 1))
            yield Slice(Group.LAYERS, 0, rows, num_keys=rows * (start + 1))
            yield Slice(Group.HEAD, 0, rows, num_keys=start + rows)


def true_s(piece: Slice) -> float:
    features = slice_features(piece, LIMITS.key_tiles)
    return sum(a * b for a, b in zip(TRUTH[slice_kind(piece)], features, strict=True))


def make_predictor(
    granularity: str = "tile", limits: SliceLimits = LIMITS, num_layers: int = NUM_LAYERS
) -> FittedPredictor:
    """One whose coefficients are the truth; tokens are chosen in 1 ms + 0.5 ms per row."""
    parsed = Granularity.parse(granularity)
    return FittedPredictor(TRUTH, num_layers, limits, parsed, choice=(1e-3, 0.5e-3))
