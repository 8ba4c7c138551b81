"""Five pictures of the layers' measurements, after the BSBR article (scaling, heat map, radar, memory, bubbles), and
one of each level of whole networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from brl_jax.layers import MECHANISMS
from eval.harness.pictures import label_points, legend_outside, line_styles, panels, plain_log_axis, save
from eval.speed.levels import LEVELS
from eval.speed.report import fitted_exponent

# What a spoke of the radar shows, and the field it is read from: the less, the better.
_SPOKES = (
    ("forward", "forward_s"),
    ("training", "forward_backward_s"),
    ("decoding", "step_s"),
    ("memory", "forward_backward_temp_bytes"),
    ("parameters", "parameters"),
)

# What the picture of a level of whole networks shows: a panel for each field, its title, unit and the unit's name.
_STEPS = {
    "forward_s": ("inference", 1, "seconds"),
    "train_s": ("a training step", 1, "seconds"),
    "train_bytes": ("its memory", 2**20, "MiB"),
}


def draw(rows: Sequence[dict], fit_from: int, folder: Path) -> list[Path]:
    """Draws what was measured of layers and whole networks; returns the files. `report.complete` makes the rows."""
    rows = [row for row in rows if not row["note"]]
    figures: dict[str, Figure] = {}
    if layers := [row for row in rows if row["level"] == "layers"]:
        figures |= _of_layers(layers, fit_from)
    for level in (name for name, level in LEVELS.items() if level.is_network):
        if networks := [row for row in rows if row["level"] == level]:
            fields = {
                field: panel for field, panel in _STEPS.items() if any(field in row for row in networks)
            }
            figures[f"{level}.png"] = _curves(networks, fit_from, fields)
    return [save(figure, folder / name) for name, figure in figures.items()]


def _of_layers(rows: Sequence[dict], fit_from: int) -> dict[str, Figure]:
    """The pictures of layers, by file name."""
    passes = {"forward": "forward pass", "forward_backward": "forward and backward pass"}
    times = {f"{name}_s": (title, 1e-3, "milliseconds") for name, title in passes.items()}
    memory = {f"{name}_temp_bytes": (title, 2**20, "temporary memory, MiB") for name, title in passes.items()}
    return {
        "scaling_curves.png": _curves(rows, fit_from, times),
        "inference_heatmap.png": _heat_map(rows),
        "radar_chart.png": _radar(rows, fit_from),
        "memory_scaling.png": _curves(rows, fit_from, memory),
        "combined_performance.png": _bubbles(rows),
    }


def _names(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in rows))


def _styles(rows: Sequence[dict]) -> dict[str, dict[str, Any]]:
    # A mechanism looks the same in every picture, whichever others were measured.
    return line_styles(tuple(dict.fromkeys((*MECHANISMS, *_names(rows)))))


def _of(rows: Sequence[dict], name: str) -> list[dict]:
    return sorted((row for row in rows if row["name"] == name), key=lambda row: row["length"])


def _curves(rows: Sequence[dict], fit_from: int, fields: Mapping[str, tuple[str, float, str]]) -> Figure:
    """A panel for each field, which has a title, a unit and the unit's name."""
    figure, [axs] = panels(1, len(fields), (8 * len(fields), 6.5))
    for axes, (field, (title, unit, label)) in zip(axs, fields.items()):
        _panel(axes, rows, fit_from, field, unit)
        axes.set(xlabel="sequence length n", ylabel=label, title=title)
    return figure


def _panel(axes: Axes, rows: Sequence[dict], fit_from: int, field: str, unit: float) -> None:
    """Log-log curves of a field over the length, the fitted exponent behind each name."""
    styles = _styles(rows)
    lengths = sorted({row["length"] for row in rows})
    ends = {}
    for name in _names(rows):
        own = [row for row in _of(rows, name) if row.get(field)]
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


def _heat_map(rows: Sequence[dict]) -> Figure:
    """Forward time of each mechanism at each length in milliseconds, coloured by its ratio to the fastest."""
    lengths = sorted({row["length"] for row in rows})
    times = {(row["name"], row["length"]): row["forward_s"] for row in rows}
    names = sorted(_names(rows), key=lambda name: [times.get((name, n), math.inf) for n in reversed(lengths)])
    table = np.array([[times.get((name, n), np.nan) for n in lengths] for name in names])
    slower = table / np.nanmin(table, axis=0)
    size = (3.5 + 0.95 * len(lengths), 2.6 + 0.42 * len(names))
    figure, [[axes]] = panels(1, 1, size, grid=None)
    limit = max(2.0, float(np.nanmax(slower)))
    image = axes.imshow(np.log2(slower), cmap="viridis_r", aspect="auto", vmin=0, vmax=math.log2(limit))
    axes.set_facecolor("#eeeeee")
    for i, j in np.ndindex(*table.shape):
        if np.isnan(table[i, j]):
            axes.text(j, i, "not run", ha="center", va="center", fontsize=8, color="#666666")
            continue
        dark = math.log2(slower[i, j]) > 0.5 * math.log2(limit)
        number = f"{1e3 * table[i, j]:.3g}" if table[i, j] < 0.1 else f"{1e3 * table[i, j]:.0f}"
        axes.text(j, i, number, ha="center", va="center", fontsize=9, color="white" if dark else "black")
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="sequence length n", title="forward pass of one layer, milliseconds")
    bar = figure.colorbar(image, ax=axes, label="times as slow as the fastest at that length")
    ticks = range(math.floor(math.log2(limit)) + 1)
    bar.set_ticks(list(ticks), labels=[f"{2**tick}" for tick in ticks])
    return figure


def common_length(rows: Sequence[dict]) -> int:
    """The largest of the lengths at which the most mechanisms were measured."""
    lengths = [row["length"] for row in rows]
    return max(set(lengths), key=lambda n: (lengths.count(n), n))


def _radar(rows: Sequence[dict], fit_from: int) -> Figure:
    """A small radar for each mechanism: the best one's cost over its own on each spoke, the median in grey."""
    length = common_length(rows)
    here = {row["name"]: row for row in rows if row["length"] == length}
    scores: dict[str, list[float]] = {name: [] for name in here}
    for _, field in _SPOKES:
        best = min((row[field] for row in here.values() if row.get(field)), default=None)
        for name, row in here.items():
            scores[name].append(best / row[field] if best and row.get(field) else 0.0)
    for name in here:
        exponent = fitted_exponent(_of(rows, name), "forward_backward_s", fit_from)
        scores[name].append(1.0 if exponent is None else 1.0 / max(exponent, 1.0))
    labels = [spoke for spoke, _ in _SPOKES] + ["scaling"]
    styles = _styles(rows)
    angles = np.linspace(0, 2 * np.pi, len(labels), endpoint=False)
    median = np.median(list(scores.values()), axis=0)
    columns = min(4, len(here))
    lines = -(-len(here) // columns)
    size = (3.6 * columns, 3.2 * lines + 1.0)
    figure, axs = panels(lines, columns, size, grid=None, subplot_kw={"projection": "polar"})
    for axes, (name, values) in zip(axs.ravel(), scores.items()):
        axes.fill(angles, median, color="#bbbbbb", alpha=0.6)
        colour = styles[name]["color"]
        axes.plot(np.append(angles, angles[0]), [*values, values[0]], color=colour, linewidth=2)
        axes.fill(angles, values, color=colour, alpha=0.15)
        axes.set_theta_offset(np.pi / 2)
        axes.set_ylim(0, 1)
        axes.set_yticks([0.25, 0.5, 0.75, 1.0], ["", "0.5", "", "1"], fontsize=7, color="#666666")
        axes.set_xticks(angles, labels, fontsize=9)
        axes.tick_params(axis="x", pad=12)
        axes.set_title(name, color=colour, fontweight="bold", pad=14)
    for axes in axs.ravel()[len(here) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"one layer at n = {length}: on each spoke the best mechanism's cost over this one's\n"
        "(1: the best; 0: not measured); scaling: 1 / exponent of the training time; grey: the median",
        fontsize=11,
    )
    return figure


def _bubbles(rows: Sequence[dict]) -> Figure:
    """Training memory against training time at one length, the area of a bubble showing the parameters."""
    length = common_length(rows)
    here = [row for row in rows if row["length"] == length]
    styles = _styles(rows)
    memory = np.array([row["forward_backward_temp_bytes"] / 2**20 for row in here])
    seconds = np.array([row["forward_backward_s"] * 1e3 for row in here])
    parameters = np.array([row["parameters"] for row in here])
    figure, [[axes]] = panels(1, 1, (11, 7))
    axes.set(xscale="log", yscale="log", xlim=(memory.min() / 1.5, memory.max() * 1.5))
    axes.set_ylim(seconds.min() / 1.5, seconds.max() * 1.5)
    area = 700 * parameters / parameters.max()
    colours = [styles[row["name"]]["color"] for row in here]
    axes.scatter(memory, seconds, s=area, c=colours, alpha=0.6, edgecolors="black", linewidths=0.8)
    label_points(
        axes,
        [
            (f"{row['name']} ({row['parameters'] / 1e6:.2f}M)", x, y, styles[row["name"]]["color"])
            for row, x, y in zip(here, memory, seconds)
        ],
        gap=0.045,
    )
    plain_log_axis(axes.xaxis)
    plain_log_axis(axes.yaxis)
    axes.set(
        xlabel="temporary memory of the forward and backward pass, MiB",
        ylabel="time of the forward and backward pass, ms",
        title=f"one layer at n = {length}; area of a bubble: parameters",
    )
    return figure
