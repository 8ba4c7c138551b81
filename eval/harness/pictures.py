"""The style of all pictures: panels, lines that can be told apart, legends, and files written without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from etils import epath
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from train.engine.storage import write_whole

_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00",
    "#56B4E9", "#8C510A", "#762A83", "#808080", "#66A61E", "#B2182B", "#00A6A6", "#E31A9C", "#5B5B00", "#9E9AF0",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "h")
_DASHES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))


Grid = Literal["both", "x", "y"]


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: Grid | None = "both", **options: Any
) -> tuple[Figure, Any]:
    """A figure of this size in inches with axes (rows, columns) and a light grid; `Figure.subplots` has the options."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for each in axes.ravel() if grid else ():
        each.grid(True, axis=grid, alpha=0.3)
    return figure, axes


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes for each name; they differ for more than a hundred names."""
    # 16 colours, 11 markers and 5 kinds of dashes have no common divisor.
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _DASHES[i % len(_DASHES)],
        }
        for i, name in enumerate(names)
    }


def legend_outside(axes: Axes, order: Callable[[str], float] | None = None) -> None:
    """Puts a legend to the right of the axes, sorted by `order` of the labels."""
    entries = list(zip(*axes.get_legend_handles_labels()))
    if order is not None:
        entries.sort(key=lambda entry: order(entry[1]))
    axes.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        handlelength=3.2,
    )


def shared_legend(figure: Figure, axes: Axes) -> None:
    """Puts one legend, with the lines of `axes`, to the right of all panels of a figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.2)


def plain_log_axis(axis: Axis) -> None:
    """Puts ticks at 1, 2 and 5 times powers of ten, written without exponents: 500, 1k, 2k."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=30))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    )
    axis.set_minor_locator(NullLocator())


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart if low..high has room for that."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    places = [0.0] * len(wanted)
    lowest = low
    for i in order:
        places[i] = lowest = max(wanted[i], lowest)
        lowest += gap
    highest = high
    for i in reversed(order):
        places[i] = highest = min(places[i], highest)
        highest -= gap
    return places


def label_points(
    axes: Axes, points: Sequence[tuple[str, float, float, str]], *, gap: float, fontsize: float = 10
) -> None:
    """Writes the names of points (name, x, y, colour) to the right of the axes at their heights, with lines that lead
    there, so that the picture needs no legend. The axes have their final scales and limits; `gap` is the least distance
    between two names, in their heights."""
    to_axes = axes.transScale + axes.transLimits
    heights = [float(to_axes.transform((x, y))[1]) for _, x, y, _ in points]
    for (name, x, y, colour), height in zip(points, spread(heights, gap, 0.01, 0.99)):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=fontsize,
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6, "relpos": (0.0, 0.5)},
        )


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as a PNG: an earlier picture of that name stays until the new one is whole."""
    content = io.BytesIO()
    figure.savefig(content, dpi=130, format="png")
    write_whole(epath.Path(path), content.getvalue())
    return path
