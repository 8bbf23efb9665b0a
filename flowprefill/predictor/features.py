"""Features: the numbers that the seconds of a slice are linear in. Pure: no torch.

Matrix products: a constant, the rows, and the rows beyond a few knots. Their coefficients are not
negative, so this is a rising curve that bends upwards: flat while the weights' reading dominates,
steeper once the arithmetic does.

Attention runs over whole key tiles (ops/attention.py), so it costs what the tiles hold: for each
key the gathering, for each row and key the products; and both once more, a little, in the tiles
that are masked because not every row may look at all of their keys.
"""

from __future__ import annotations

from dataclasses import replace

from flowprefill.programs.slices import Group, Slice

KEY_TILE_EDGES = (128, 512, 1024)
"""Ends of the first key tiles; behind them every tile is as wide as the last edge. A test holds
this to ops/attention.py, which needs torch."""
_ROW_KNOTS = (0, 16, 64, 256, 1024)
_PRODUCT_NAMES = ("", "row", *(f"row > {knot}" for knot in _ROW_KNOTS[1:]))

FEATURE_NAMES: dict[str, tuple[str, ...]] = {
    "qkv": _PRODUCT_NAMES,
    "attention": ("", "row", "key", "masked key", "row x key", "row x masked key"),
    "mlp": _PRODUCT_NAMES,
    "head": ("", "key"),
    "decode_attention": ("", "row", "key of a row", "key"),
    "logits": _PRODUCT_NAMES,
}
"""What each feature counts, by slice kind; the first is the constant."""


def slice_kind(piece: Slice) -> str:
    """Slices of one kind share coefficients."""
    if piece.group is Group.ATTENTION and piece.sequence is None:
        return "decode_attention"
    return piece.group.value


def slice_features(piece: Slice) -> tuple[float, ...]:
    """Numbers in the order of FEATURE_NAMES."""
    rows = piece.num_rows
    if piece.group is Group.HEAD:
        return 1.0, float(piece.num_keys)
    if piece.group is not Group.ATTENTION:
        return _product_features(rows)
    if piece.sequence is None:
        keys = key_tile_end(piece.num_keys // max(rows, 1))
        return 1.0, float(rows), float(keys), float(rows * keys)
    keys = key_tile_end(piece.num_keys)
    masked = keys - key_tile_start(piece.position)
    return 1.0, float(rows), float(keys), float(masked), float(rows * keys), float(rows * masked)


def without_context(piece: Slice) -> Slice:
    """The slice as it would be if attention read nothing."""
    return replace(piece, num_keys=0, position=0)


def key_tile_end(num_keys: int) -> int:
    """Keys of the tiles that cover positions 0..num_keys."""
    for edge in KEY_TILE_EDGES:
        if num_keys <= edge:
            return edge if num_keys > 0 else 0
    width = KEY_TILE_EDGES[-1]
    return -(-num_keys // width) * width


def key_tile_start(position: int) -> int:
    """Where the key tile that holds `position` starts."""
    if position >= KEY_TILE_EDGES[-1]:
        return position // KEY_TILE_EDGES[-1] * KEY_TILE_EDGES[-1]
    return max((edge for edge in KEY_TILE_EDGES if edge <= position), default=0)


def _product_features(rows: int) -> tuple[float, ...]:
    return (1.0, *[float(rows - knot) if rows > knot else 0.0 for knot in _ROW_KNOTS])
