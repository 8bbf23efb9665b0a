"""Profile: what the passes at load showed, as a value and as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowprefill.programs.slices import Group, Slice


@dataclass(frozen=True)
class Profile:
    """Seconds of slices of many shapes on one device, and whether the bit rule holds there."""

    samples: Sequence[tuple[Slice, float]]
    """One slice of each shape and its seconds, while the machine did nothing else."""
    choices: Sequence[tuple[int, float]]
    """Rows of logits, and the seconds that choosing their tokens took."""
    is_bit_invariant: bool
    """Chunked prefill and decode gave the bits of the whole prefill."""
    calibration_s: float
    """How long the passes took."""
    is_steady: bool = True
    """The same slices took about the same time again; if not, the machine was busy with something
    else, and a later load should try once more."""
    is_cached: bool = False
    """Read from disk; the passes ran at an earlier load."""

    def to_json(self) -> dict[str, Any]:
        """What from_json reads."""
        return {
            "samples": [[*_slice_to_json(piece), seconds] for piece, seconds in self.samples],
            "choices": [list(choice) for choice in self.choices],
            "is_bit_invariant": self.is_bit_invariant,
            "calibration_s": self.calibration_s,
        }

    @staticmethod
    def from_json(values: Any) -> Profile:
        """Raises ValueError, TypeError or KeyError if `values` is not what to_json gave."""
        samples = [_sample_from_json(*row) for row in values["samples"]]
        choices = [(_count(rows), _seconds(seconds)) for rows, seconds in values["choices"]]
        is_bit_invariant = values["is_bit_invariant"]
        if not samples or not choices or not isinstance(is_bit_invariant, bool):
            raise ValueError("an incomplete profile")
        calibration_s = _seconds(values["calibration_s"])
        return Profile(samples, choices, is_bit_invariant, calibration_s, is_cached=True)


def _slice_to_json(piece: Slice) -> list[Any]:
    return [
        piece.group.value,
        piece.start,
        piece.end,
        piece.sequence,
        piece.position,
        piece.num_keys,
        piece.num_layers,
    ]


def _sample_from_json(
    group: Any,
    start: Any,
    end: Any,
    sequence: Any,
    position: Any,
    num_keys: Any,
    num_layers: Any,
    seconds: Any,
) -> tuple[Slice, float]:
    piece = Slice(
        Group(group),
        _count(start),
        _count(end),
        sequence if sequence is None else _count(sequence),
        _count(position),
        _count(num_keys),
        _count(num_layers),
    )
    if piece.num_rows <= 0:
        raise ValueError(f"a slice of {piece.num_rows} rows")
    return piece, _seconds(seconds)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: Any) -> float:
    if type(value) is not float or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a time")
    return value
