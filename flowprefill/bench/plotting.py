"""What the benchmarks that draw a picture share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowprefill.bench.report import BenchmarkError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Before the first minute, not after the last. Raises BenchmarkError."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise BenchmarkError("--plot needs matplotlib: pip install 'flowprefill[bench]'")
    if path.suffix not in PLOT_SUFFIXES:
        raise BenchmarkError(f"--plot {path}: must end in one of {', '.join(PLOT_SUFFIXES)}")


def check_plots_folder(folder: Path) -> None:
    """The same for several pictures."""
    if find_spec("matplotlib") is None:
        raise BenchmarkError("--plots needs matplotlib: pip install 'flowprefill[bench]'")
    if folder.exists() and not folder.is_dir():
        raise BenchmarkError(f"--plots {folder}: is no folder")


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on, of a figure of `size` inches; written to `path` behind the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=size)
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=150, bbox_inches="tight")
    finally:
        pyplot.close(drawing)
