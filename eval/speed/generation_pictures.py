"""Pictures of generation with a cache, after the six of TLinFormer's figure 9, as panels of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.harness.pictures import panels, plain_log_axis, save

_TLIN, _PLAIN, _DARK = "#0072B2", "#D55E00", "#333333"


def draw(rows: Sequence[dict], folder: Path) -> Path:
    """Draws the rows of `eval.speed.generation` and returns the file."""
    return save(picture(rows), folder / "generation.png")


def picture(rows: Sequence[dict]) -> Figure:
    """The rows of `eval.speed.generation` as panels, without panels of a single point."""
    by_name: dict[str, dict[int, dict]] = {}
    for row in rows:
        if not row["note"]:
            by_name.setdefault(row["name"], {})[row["length"]] = row
    tlin = by_name.get("tlinformer", {})
    plain = by_name.get("plain decoder", {})
    prompt = by_name.get("plain decoder, prompt", {})

    def curve(found: dict[int, dict], field: str, scale: float = 1e3) -> list[tuple[int, float]]:
        return [(n, found[n][field] * scale) for n in sorted(found) if found[n].get(field)]

    def ratio(above: list, below: list) -> list[tuple[int, float]]:
        known = dict(below)
        return [(n, value / known[n]) for n, value in above if n in known]

    first, step = curve(prompt, "first_token_s"), curve(plain, "hit_s")
    whole, miss, hit = (curve(tlin, f"{name}_s") for name in ("first_token", "miss", "hit"))
    size, plain_size = curve(tlin, "cache_bytes", 2**-20), curve(plain, "cache_bytes", 2**-20)
    wanted = [
        ("(a) plain decoder", "milliseconds", {"first token": (first, _DARK), "next token": (step, _PLAIN)}),
        (
            "(b) TLinFormer",
            "milliseconds",
            {"first token": (whole, _DARK), "miss": (miss, "#009E73"), "hit": (hit, _TLIN)},
        ),
        ("(c) plain decoder: first token over next", "times", {"ratio": (ratio(first, step), _PLAIN)}),
        ("(d) TLinFormer: miss over hit", "times", {"ratio": (ratio(miss, hit), _TLIN)}),
        ("(e) cache", "MiB", {"plain decoder": (plain_size, _PLAIN), "TLinFormer": (size, _TLIN)}),
        (
            "(f) plain decoder's time over TLinFormer's",
            "times",
            {
                "first token": (ratio(first, whole), _DARK),
                "next token, on a hit": (ratio(step, hit), _TLIN),
                "next token, on a miss": (ratio(step, miss), "#009E73"),
            },
        ),
    ]
    # A curve of one point shows nothing; its number goes below the panels of longer curves.
    shown = [panel for panel in wanted if _longest(panel[2]) > 1] or wanted
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure, axs = panels(lines, columns, (16 * columns / 3, 4.75 * lines))
    for axes, panel in zip(axs.ravel(), shown):
        _panel(axes, *panel)
    for axes in axs.ravel()[len(shown) :]:
        axes.set_visible(False)
    numbers = [
        f"{panel[0]}: {_number(points[0][1])} at {points[0][0]:,} tokens, the only length measured"
        for panel in wanted
        if panel not in shown
        for points, _ in panel[2].values()
        if points
    ]
    if numbers:
        figure.supxlabel("; ".join(numbers), fontsize=10)
    return figure


def _longest(curves: dict[str, tuple[list, str]]) -> int:
    """The number of points of the longest curve."""
    return max(len(points) for points, _ in curves.values())


def _number(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _panel(axes: Axes, title: str, label: str, curves: dict[str, tuple[list, str]]) -> None:
    """Draws curves over the length, and writes the numbers of curves with one point."""
    axes.set(title=title, xlabel="tokens so far", ylabel=label)
    known = {name: curve for name, curve in curves.items() if curve[0]}
    alone = [
        f"{name}, at {points[0][0]:,} tokens only: {_number(points[0][1])}"
        for name, (points, _) in known.items()
        if len(points) == 1
    ]
    if len(alone) == len(known):
        text = "\n".join(alone) if alone else "not measured"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        return
    for name, (points, colour) in known.items():
        if len(points) > 1:
            axes.plot(*zip(*points), label=name, color=colour, marker="o", linewidth=1.8)
    axes.set(xscale="log", yscale="log")
    plain_log_axis(axes.yaxis)
    axes.set_xscale("log", base=2)
    if alone:
        axes.set_title("\n".join([title, *alone]), fontsize="medium")
    if len(known) > 1:
        axes.legend(frameon=False)
