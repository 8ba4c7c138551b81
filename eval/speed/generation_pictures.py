"""Pictures of generation with a cache, after the six of TLinFormer's figure 9, as panels of one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eval.harness.pictures import panels, plain_log_axis, save

_TLIN, _PLAIN, _MISS, _DARK = "#0072B2", "#D55E00", "#009E73", "#333333"


def draw(rows: Sequence[dict], folder: Path) -> Path:
    """Draws the rows of `eval.speed.generation` and returns the file."""
    return save(picture(rows), folder / "generation.png")


def picture(rows: Sequence[dict]) -> Figure:
    """The rows of `eval.speed.generation` as panels."""
    by_name: dict[str, dict[int, dict]] = {}
    for row in rows:
        if not row["note"]:
            by_name.setdefault(row["name"], {})[row["length"]] = row
    tlin, plain, prompt = (
        by_name.get(name, {}) for name in ("tlinformer", "plain decoder", "plain decoder, prompt")
    )

    def curve(found: dict[int, dict], field: str, scale: float = 1e3) -> dict[int, float]:
        return {n: found[n][field] * scale for n in sorted(found) if found[n].get(field)}

    def ratio(above: dict[int, float], below: dict[int, float]) -> dict[int, float]:
        return {n: value / below[n] for n, value in above.items() if n in below}

    first, step = curve(prompt, "first_token_s"), curve(plain, "hit_s")
    whole, miss, hit = (curve(tlin, f"{name}_s") for name in ("first_token", "miss", "hit"))
    size, plain_size = curve(tlin, "cache_bytes", 2**-20), curve(plain, "cache_bytes", 2**-20)
    figure, axs = panels(2, 3, (16, 9.5))
    for axes, (title, unit, curves) in zip(
        axs.ravel(),
        [
            (
                "(a) plain decoder",
                "milliseconds",
                [("first token", first, _DARK), ("next token", step, _PLAIN)],
            ),
            (
                "(b) TLinFormer",
                "milliseconds",
                [("first token", whole, _DARK), ("miss", miss, _MISS), ("hit", hit, _TLIN)],
            ),
            ("(c) plain decoder: first token over next", "times", [("ratio", ratio(first, step), _PLAIN)]),
            ("(d) TLinFormer: miss over hit", "times", [("ratio", ratio(miss, hit), _TLIN)]),
            ("(e) cache", "MiB", [("plain decoder", plain_size, _PLAIN), ("TLinFormer", size, _TLIN)]),
            (
                "(f) plain decoder's time over TLinFormer's",
                "times",
                [
                    ("first token", ratio(first, whole), _DARK),
                    ("next token, on a hit", ratio(step, hit), _TLIN),
                    ("next token, on a miss", ratio(step, miss), _MISS),
                ],
            ),
        ],
    ):
        axes.set(title=title, xlabel="tokens so far", ylabel=unit, xscale="log", yscale="log")
        for name, points, colour in curves:
            if points:
                axes.plot(*zip(*points.items()), label=name, color=colour, marker="o", linewidth=1.8)
        plain_log_axis(axes.yaxis)
        axes.set_xscale("log", base=2)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    return figure
