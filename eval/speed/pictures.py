"""A picture of each level's measurements: time and memory over the length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from brl_jax.layers import MECHANISMS
from eval.harness.pictures import legend_outside, line_styles, panels, plain_log_axis, save
from eval.harness.table import fitted_exponent

# The fields that have a panel, with its title, unit and the unit's name.
_PANELS = {
    "forward_s": ("inference", 1, "seconds"),
    "forward_backward_s": ("forward and backward pass", 1, "seconds"),
    "step_s": ("a decoding step", 1, "seconds"),
    "first_token_s": ("first token", 1, "seconds"),
    "miss_s": ("next token, on a miss", 1, "seconds"),
    "hit_s": ("next token, on a hit", 1, "seconds"),
    "train_s": ("a training step", 1, "seconds"),
    "forward_backward_temp_bytes": ("temporary memory", 2**20, "MiB"),
    "train_bytes": ("its memory", 2**20, "MiB"),
    "cache_bytes": ("cache", 2**20, "MiB"),
}


def draw(rows: Sequence[dict], fit_from: int, folder: Path) -> list[Path]:
    """Draws what was measured of each level; returns the files. `report.complete` makes the rows."""
    rows = [row for row in rows if not row["note"]]
    files = []
    for level in dict.fromkeys(row["level"] for row in rows):
        own = [row for row in rows if row["level"] == level]
        shown = {field: panel for field, panel in _PANELS.items() if any(row.get(field) for row in own)}
        figure, [axs] = panels(1, len(shown), (8 * len(shown), 6.5))
        for axes, (field, (title, unit, label)) in zip(axs, shown.items()):
            _panel(axes, own, fit_from, field, unit)
            axes.set(xlabel="sequence length n", ylabel=label, title=title)
        files.append(save(figure, folder / f"{level}.png"))
    return files


def _panel(axes: Axes, rows: Sequence[dict], fit_from: int, field: str, unit: float) -> None:
    """Log-log curves of a field over the length, the fitted exponent behind each name."""
    names = tuple(dict.fromkeys(row["name"] for row in rows))
    # A mechanism looks the same in every picture, whichever others were measured.
    styles = line_styles(tuple(dict.fromkeys((*MECHANISMS, *names))))
    lengths = sorted({row["length"] for row in rows})
    ends = {}
    for name in names:
        own = sorted(
            (row for row in rows if row["name"] == name and row.get(field)), key=lambda row: row["length"]
        )
        if not own:
            continue
        exponent = fitted_exponent(own, field, fit_from)
        label = name if exponent is None else f"{name}  $n^{{{exponent:.2f}}}$"
        # The legend has the order of the curves at their right end; one that ends early is extended.
        ends[label] = own[-1][field] * (lengths[-1] / own[-1]["length"]) ** (exponent or 1.0)
        values = [row[field] / unit for row in own]
        axes.plot(
            [row["length"] for row in own], values, label=label, linewidth=1.6, markersize=5.5, **styles[name]
        )
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:.0f}"))
    axes.tick_params(axis="x", rotation=45)
    plain_log_axis(axes.yaxis)
    legend_outside(axes, order=lambda label: -ends[label])
