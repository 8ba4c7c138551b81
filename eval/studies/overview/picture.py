"""README's picture: time and memory over the length, of full attention and ours, on a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.harness.pictures import line_styles, panels, plain_log_axis

# What a curve is called, by the name of its row: those of `eval.speed`, and of the H200's table.
_CPU = {
    "jax_nn": "full, jax.nn",
    "torch full": "full, PyTorch",
    "local": "local, window 256",
    "linear": "linear",
    "deltanet": "delta rule",
}
_GPU = {"full": "full, cuDNN", "local": "local, window 256", "linear": "linear", "delta rule": "delta rule"}
_STYLES = line_styles(
    ("local, window 256", "full, jax.nn", "linear", "delta rule", "full, PyTorch", "full, cuDNN")
)


def draw(rows: Sequence[dict[str, Any]], gpu: Mapping[str, Mapping[int, float]]) -> Figure:
    """Time and temporary memory of the forward and backward pass on a CPU, and its time on an H200.

    Args:
      rows: what `eval.speed --levels functions --json` measured.
      gpu: milliseconds on the H200 by the function's name and the length.
    """
    figure, [axs] = panels(1, 3, (14, 4.6))
    curves: dict[str, Mapping[str, Mapping[int, float]]] = {
        "two CPU cores, float32, 4 heads of 64:\nmilliseconds": _curves(rows, "forward_backward_s", 1e-3),
        "the same: temporary memory, MiB": _curves(rows, "forward_backward_temp_bytes", 2**20),
        "H200, bfloat16, 8 heads of 128:\nmilliseconds": {_GPU[name]: gpu[name] for name in _GPU},
    }
    for axes, (title, named) in zip(axs, curves.items()):
        for name, points in named.items():
            axes.plot(
                list(points), list(points.values()), label=name, linewidth=2, markersize=6, **_STYLES[name]
            )
        _finish(axes, title, sorted({n for points in named.values() for n in points}))
    figure.suptitle("Forward and backward pass of one causal call, by the number of tokens")
    handles = {}
    for axes in axs:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
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
