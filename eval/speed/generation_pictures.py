"""The six pictures of generation with a cache, after TLinFormer's figure 9, as panels of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.plotting import plain_log_axis, save

_TLIN, _PLAIN, _DARK = "#0072B2", "#D55E00", "#333333"


def draw(rows: Sequence[dict], folder: Path) -> Path:
    """Draws the rows of `eval.speed.generation` and returns the file."""
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
    figure = Figure(figsize=(16, 9.5), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    _panel(
        panels[0],
        "(a) plain decoder",
        "milliseconds",
        {"first token": (first, _DARK), "next token": (step, _PLAIN)},
    )
    _panel(
        panels[1],
        "(b) TLinFormer",
        "milliseconds",
        {"first token": (whole, _DARK), "miss": (miss, "#009E73"), "hit": (hit, _TLIN)},
    )
    _panel(
        panels[2],
        "(c) plain decoder: first token over next",
        "times",
        {"ratio": (ratio(first, step), _PLAIN)},
    )
    _panel(panels[3], "(d) TLinFormer: miss over hit", "times", {"ratio": (ratio(miss, hit), _TLIN)})
    _panel(
        panels[4],
        "(e) cache",
        "MiB",
        {"plain decoder": (plain_size, _PLAIN), "TLinFormer": (size, _TLIN)},
    )
    _panel(
        panels[5],
        "(f) plain decoder's time over TLinFormer's",
        "times",
        {
            "first token": (ratio(first, whole), _DARK),
            "next token, on a hit": (ratio(step, hit), _TLIN),
            "next token, on a miss": (ratio(step, miss), "#009E73"),
        },
    )
    return save(figure, folder / "generation.png")


def _panel(axes: Axes, title: str, label: str, curves: dict[str, tuple[list, str]]) -> None:
    """Draws curves over the length. A panel without two points of any curve states its numbers instead."""
    axes.set(title=title, xlabel="tokens so far", ylabel=label)
    known = {name: curve for name, curve in curves.items() if curve[0]}
    if not any(len(points) > 1 for points, _ in known.values()):
        lines = [
            f"{name}: {points[0][1]:.3g} at {points[0][0]} tokens" for name, (points, _) in known.items()
        ]
        text = "\n".join([*lines, "measured at one length only"]) if lines else "not measured"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        return
    for name, (points, colour) in known.items():
        note = "" if len(points) > 1 else f" ({points[0][0]} tokens only)"
        style = "o" if len(points) > 1 else "D"
        axes.plot(*zip(*points), label=name + note, color=colour, marker=style, linewidth=1.8)
    axes.set(xscale="log", yscale="log")
    plain_log_axis(axes.yaxis)
    axes.set_xscale("log", base=2)
    axes.grid(True, which="major", alpha=0.3)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
