"""README's picture: time and memory over the length, of full attention and ours, on a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.harness.pictures import line_styles, panels, plain_log_axis

# What a curve or a bar is called, by the name of its row in `eval.speed`, and by its mechanism on the H200.
_CPU = {
    "jax_nn": "full, jax.nn",
    "torch full": "full, PyTorch",
    "local": "local, window 256",
    "linear": "linear",
    "deltanet": "delta rule",
}
_GPU = {
    "full": "full, cuDNN",
    "deltanet": "delta rule",
    "linear": "linear",
    "local": "local, window 256",
}
_STYLES = line_styles(
    ("local, window 256", "full, jax.nn", "linear", "delta rule", "full, PyTorch", "full, cuDNN")
)


def draw(rows: Sequence[dict[str, Any]], gpu: Mapping[str, float]) -> Figure:
    """Time and temporary memory of the forward and backward pass on a CPU, as `eval.speed` measured them, and its
    milliseconds on an H200 at 16,384 tokens."""
    figure, [axs] = panels(1, 3, (14, 4.4))
    curves = {
        "CPU, float32, 4 heads of 64: milliseconds": _curves(rows, "forward_backward_s", 1e-3),
        "CPU: temporary memory, MiB": _curves(rows, "forward_backward_temp_bytes", 2**20),
    }
    for axes, (title, named) in zip(axs, curves.items()):
        for name, points in named.items():
            axes.plot(*zip(*points.items()), label=name, linewidth=2, markersize=6, **_STYLES[name])
        _finish(axes, title, sorted({n for points in named.values() for n in points}))
    names = list(_GPU.values())
    bars = axs[2].barh(names, [gpu[row] for row in _GPU], color=[_STYLES[name]["color"] for name in names])
    axs[2].bar_label(bars, fmt="%.2f", padding=4)
    axs[2].set(title="H200, bfloat16, 8 heads of 128: milliseconds", xlabel="at 16k tokens")
    axs[2].margins(x=0.15)
    figure.suptitle("Forward and backward pass of one causal call, by the number of tokens")
    handles, labels = axs[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _curves(rows: Sequence[dict[str, Any]], field: str, unit: float) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        if row["name"] in _CPU and row.get(field):
            curves.setdefault(_CPU[row["name"]], {})[row["length"]] = row[field] / unit
    return curves


def _finish(axes: Axes, title: str, lengths: Sequence[int]) -> None:
    axes.set(xscale="log", yscale="log", title=title, xlabel="tokens")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k"))
    plain_log_axis(axes.yaxis)
