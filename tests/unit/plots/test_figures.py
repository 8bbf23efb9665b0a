"""Figures say what they show: axes with units, a legend beside, lines where the data is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from flowprefill.bench.plots import style
from flowprefill.bench.plots.attainment import (
    Curve,
    interval,
    rate_figure,
    rate_panels,
    scale_figure,
)
from flowprefill.bench.plots.style import cell_styles, save
from flowprefill.bench.plots.ttft import MIN_TTFT_S, ClassTtfts, class_ttfts, ttft_figure
from flowprefill.workload import Objective

FCFS = Curve("fcfs/whole", [0.5, 1.0, 2.0], [[1.0, 0.9], [0.5, 0.6], [0.1, 0.2]])
SEDF = Curve("s-edf/tile", [0.5, 1.0, 2.0], [[1.0, 1.0], [0.9, 1.0], [0.7, 0.8]])
BOUND = Curve("offline bound", [0.5, 2.0], [[1.0, 1.0], [0.9, 0.9]])
CLASSES = [
    ClassTtfts("text", 0.25, {"fcfs/whole": [0.1, 3.0, math.inf, 0.2], "s-edf/tile": [0.1] * 4}),
    ClassTtfts("file", None, {"fcfs/whole": [4.0, 5.0], "s-edf/tile": [0.0, 6.0]}),
    ClassTtfts("image", 0.5, {"fcfs/whole": [1.0], "s-edf/tile": [0.4]}),
]


def legend_labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def check_nothing_overlaps(figure: Figure) -> None:
    """The legend covers no axes, and nothing is cut off."""
    figure.draw_without_rendering()
    canvas = figure.bbox
    (legend,) = figure.legends
    covered = legend.get_window_extent()
    texts = [text for text in figure.texts if text.get_text()]
    for part in (*texts, *(axes for axes in figure.axes if axes.get_visible())):
        assert not covered.overlaps(part.get_tightbbox())
    for axes in figure.axes:
        check_ticks_do_not_touch(axes)
    for part in (*figure.legends, *(axes for axes in figure.axes if axes.get_visible())):
        box = part.get_tightbbox()
        assert canvas.x0 <= box.x0 and box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0 and box.y1 <= canvas.y1


def check_ticks_do_not_touch(axes: Axes) -> None:
    low, high = axes.get_xlim()
    labels = [
        label.get_window_extent()
        for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low <= position <= high and label.get_text()
    ]
    assert labels
    for left, right in itertools.pairwise(sorted(labels, key=lambda box: box.x0)):
        assert left.x1 < right.x0


def test_attainment_against_rate_shows_all_cells_the_bound_and_the_target() -> None:
    figure = rate_figure([FCFS, SEDF], title="a trace", rate_at_load_1=5.0, bound=BOUND)
    axes = figure.axes[0]
    assert legend_labels(figure) == ["fcfs/whole", "s-edf/tile", "offline bound", "target 90%"]
    assert "prefill seconds per second" in axes.get_xlabel()
    assert axes.get_ylabel() == "requests with TTFT objective met"
    assert axes.get_title() == "a trace"
    assert axes.get_ylim() == (0, 1.02) and axes.get_xlim()[0] == 0
    fcfs, sedf, bound, target = axes.get_lines()
    assert list(fcfs.get_xdata()) == [0.5, 1.0, 2.0]
    assert list(fcfs.get_ydata()) == pytest.approx([0.95, 0.55, 0.15])
    assert list(sedf.get_ydata()) == pytest.approx([1.0, 0.95, 0.75])
    assert list(bound.get_ydata()) == pytest.approx([1.0, 0.9])
    assert set(target.get_ydata()) == {0.9}
    check_nothing_overlaps(figure)


def test_panels_share_axes_and_styles_and_one_legend() -> None:
    tile, chunk = replace(SEDF, name="tile"), replace(FCFS, name="chunk:2048")
    panels = {"s-edf": [FCFS, tile], "goodput": [FCFS, chunk, tile], "srpt": [tile]}
    figure = rate_panels(panels, title="a trace\nits machine", rate_at_load_1=5.0, bound=BOUND)
    names = ["fcfs/whole", "tile", "chunk:2048"]
    assert legend_labels(figure) == [*names, "offline bound", "target 90%"]
    assert [axes.get_title() for axes in figure.axes] == ["s-edf", "goodput", "srpt"]
    looks: dict[str, set[object]] = {}
    for axes, curves in zip(figure.axes, panels.values(), strict=True):
        assert "prefill seconds per second" in axes.get_xlabel()
        assert axes.child_axes[0].get_xlabel() == "arrival rate, requests per second"
        assert axes.get_ylim() == figure.axes[0].get_ylim()
        assert axes.get_xlim() == figure.axes[0].get_xlim()
        for line, curve in zip(axes.get_lines(), curves, strict=False):
            assert line.get_label() == curve.name
            looks.setdefault(curve.name, set()).add((line.get_color(), line.get_marker()))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == 3
    assert figure.axes[0].get_ylabel() == "requests with TTFT objective met"
    check_nothing_overlaps(figure)


def test_shares_near_one_get_the_room() -> None:
    high = Curve("s-edf/tile", [0.5, 1.0], [[1.0, 0.98], [0.86, 0.9]])
    figure = rate_figure([high], title="", rate_at_load_1=5.0)
    assert figure.axes[0].get_ylim() == pytest.approx((0.8, 1.02))


def test_the_upper_axis_counts_requests_per_second() -> None:
    figure = rate_figure([FCFS], title="", rate_at_load_1=5.0)
    axes = figure.axes[0]
    axes.set_xlim(0, 2)
    figure.draw_without_rendering()
    (top,) = axes.child_axes
    assert top.get_xlim() == (0, 10)
    assert top.get_xlabel() == "arrival rate, requests per second"


def test_attainment_against_scale_is_logarithmic_with_plain_numbers() -> None:
    title = "qwentrace_like_synthetic_10min\nLlama-3.1-8B on A800-80GB, simulated, load 0.7"
    figure = scale_figure([FCFS, SEDF], title=title)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert "scale of all TTFT objectives" in axes.get_xlabel()
    assert axes.xaxis.get_major_formatter()(0.5) == "0.5"
    check_nothing_overlaps(figure)


@pytest.mark.parametrize(
    ("scales", "ticks"),
    [((0.75, 1.0), ["0.8", "0.9", "1"]), ((0.25, 4.0), ["0.25", "0.5", "1", "2", "4"])],
)
def test_there_are_ticks_enough_for_scales_near_each_other(
    scales: tuple[float, ...], ticks: list[str]
) -> None:
    figure = scale_figure([Curve("s-edf/tile", scales, [[0.5], [1.0]])], title="")
    axes = figure.axes[0]
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for x, label in labels if low <= x <= high] == ticks
    check_nothing_overlaps(figure)


def test_bands_hold_the_mean_and_vanish_for_one_window() -> None:
    middle, low, high = interval([[0.2, 0.4, 0.9], [0.5, 0.5, 0.5]])
    assert list(middle) == pytest.approx([0.5, 0.5])
    assert 0.2 <= low[0] < 0.5 < high[0] <= 0.9
    assert low[1] == high[1] == 0.5
    middle, low, high = interval([[0.3]])
    assert middle == low == high == 0.3


def test_cells_differ_by_colour_and_by_marker() -> None:
    names = [f"policy/{i}" for i in range(12)]
    styles = cell_styles(names)
    looks = {(s["color"], s["marker"], s["linestyle"]) for s in styles.values()}
    assert len(looks) == 12
    assert len({s["color"] for s in list(styles.values())[:8]}) == 8
    assert len({s["marker"] for s in list(styles.values())[:8]}) == 8


def test_ttft_has_a_panel_per_class_with_its_objective() -> None:
    title = "qwentrace_like_synthetic_10min\nLlama-3.1-8B on A800-80GB, simulated, load 0.7"
    figure = ttft_figure(CLASSES, title=title)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title() for axes in panels]
    assert titles == [
        "text: 4 requests, objective 0.25 s",
        "file: 2 requests, objective by length",
        "image: 1 requests, objective 0.5 s",
    ]
    assert legend_labels(figure) == ["fcfs/whole", "s-edf/tile", "objective"]
    labels = [axes.get_xlabel() for axes in panels]
    assert labels == ["", *2 * ["time to first token, seconds"]]
    assert figure.get_supylabel() == "share of the requests"
    assert all(axes.get_xscale() == "log" and axes.get_ylim() == (0, 1.02) for axes in panels)
    text = panels[0].get_lines()
    assert list(text[-1].get_xdata()) == [0.25, 0.25]
    # One of four never got a token: the line ends at three quarters.
    assert list(text[0].get_xdata()) == [0.1, 0.2, 3.0]
    assert list(text[0].get_ydata()) == pytest.approx([0.25, 0.5, 0.75])
    assert len(panels[1].get_lines()) == 2
    assert panels[1].get_lines()[1].get_xdata()[0] == MIN_TTFT_S
    check_nothing_overlaps(figure)


def test_classes_are_ordered_by_objective_and_one_by_length_has_none() -> None:
    seconds = [("file", 6.0), ("search", 4.0), ("text", 0.25), ("search", 5.0), ("text", 0.25)]
    goals = [Objective(name, ttft_s, 0.1) for name, ttft_s in seconds]
    ttft_s = {"fcfs/whole": {"text": [0.1, 0.2], "file": [1.0]}, "s-edf/tile": {"search": [2.0]}}
    assert class_ttfts(goals, ttft_s) == [
        ClassTtfts("text", 0.25, {"fcfs/whole": [0.1, 0.2], "s-edf/tile": ()}),
        ClassTtfts("search", None, {"fcfs/whole": (), "s-edf/tile": [2.0]}),
        ClassTtfts("file", 6.0, {"fcfs/whole": [1.0], "s-edf/tile": ()}),
    ]


def test_a_saved_picture_is_wide_enough_to_read_and_small_enough_to_ship(tmp_path: Path) -> None:
    path = tmp_path / "new" / "attainment.png"
    save(rate_figure([FCFS, SEDF], title="a trace", rate_at_load_1=5.0), path)
    with Image.open(path) as picture:
        width, _ = picture.size
    assert width == style.SIZE[0] * style.DPI >= 800
    assert path.stat().st_size < 150_000


def test_colours_are_told_apart_in_grey_or_by_marker() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert len(np.unique([round(grey(colour)) for colour in style.PALETTE])) == len(style.PALETTE)
