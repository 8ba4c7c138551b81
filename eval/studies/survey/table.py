"""The survey's table, and its picture: accuracy against speed, the area of a bubble showing the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.harness.pictures import label_points, line_styles, panels, plain_log_axis
from eval.harness.table import Table
from eval.speed.networks import CONTROL
from eval.tasks.lra import summarise

BASE = "full"
# An accuracy that is fewer standard errors above chance gets a mark: the network has hardly learned.
_ERRORS = 5.0


class Cell(NamedTuple):
    """A network on a task: accuracy in percent with its standard error, the number of seeds, and the accuracy of the
    most frequent class; steps a second and bytes of a training step. None for what was not measured."""

    accuracy: float | None
    error: float | None
    seeds: int
    chance: float | None
    parameters: int | None
    steps_per_s: float | None
    bytes: float | None

    @property
    def has_learned(self) -> bool:
        """Whether the accuracy is clearly above chance."""
        if self.accuracy is None or self.error is None or self.chance is None:
            return False
        return self.accuracy - self.chance >= _ERRORS * self.error


Cells = Mapping[str, Mapping[str, Cell]]


def collect(
    results: Sequence[Mapping[str, Any]],
    speeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
    networks: Sequence[str],
    tasks: Sequence[str],
) -> dict[str, dict[str, Cell]]:
    """The cells by network and task, from the measures of runs (`eval.lra`) with the network's name as "network", and
    from rows of `eval.speed.measure` by task and network."""
    summary = summarise([{**result, "model": result["network"]} for result in results])
    cells: dict[str, dict[str, Cell]] = {}
    for name in networks:
        for task in tasks:
            accuracy, error, seeds = summary.get(name, {}).get(task, (None, None, 0))
            own = [r for r in results if (r["network"], r["task"]) == (name, task)]
            row = speeds.get(task, {}).get(name, {})
            parameters = own[0]["parameters"] if own else row.get("parameters")
            cells.setdefault(name, {})[task] = Cell(
                accuracy,
                error,
                seeds,
                100 * own[0]["chance"] if own else None,
                parameters,
                1 / row["train_s"] if row.get("train_s") else None,
                row.get("train_bytes"),
            )
    return cells


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def mean_accuracy(cells: Mapping[str, Cell]) -> float | None:
    """The mean accuracy of a network over the tasks; None if one is missing."""
    return _mean([cell.accuracy for cell in cells.values()])


def markdown(cells: Cells, tasks: Sequence[str]) -> str:
    """The table, the networks in the order of their mean accuracy, and what the control shows."""
    order = sorted(
        cells, key=lambda name: -(mean_accuracy(cells[name]) or -1.0)
    )  # stable: those without a mean stay in their order
    table = Table(
        "mechanism", "parameters, thousands", *tasks, "mean", *(f"{t}: steps/s" for t in tasks),
        *(f"{t}: MiB" for t in tasks),
        title="Accuracy on the test split, percent ± standard error (seeds); † fewer than five errors above chance. "
        "Training steps a second and the memory of a step, MiB.",
    )  # fmt: skip
    for name in order:
        row = cells[name]
        parameters = ["-" if c.parameters is None else f"{c.parameters / 1e3:.0f}" for c in row.values()]
        mean = mean_accuracy(row)
        table.add(
            name,
            " / ".join(parameters if len(set(parameters)) > 1 else parameters[:1]),
            *(_accuracy(row[task]) for task in tasks),
            None if mean is None else f"{mean:.2f}",
            *(None if (s := row[task].steps_per_s) is None else f"{s:.3g}" for task in tasks),
            *(_mebibytes(row[task].bytes) for task in tasks),
        )
    shown = []
    for task in tasks:
        known = [chance for row in cells.values() if (chance := row[task].chance) is not None]
        shown.append(f"{max(known):.2f}" if known else None)
    table.add("chance (the most frequent class)", None, *shown, *[None] * (1 + 2 * len(tasks)))
    return "\n".join([str(table), "", *control_lines(cells, tasks)])


def _accuracy(cell: Cell) -> str:
    if cell.accuracy is None or cell.error is None:
        return "-"
    mark = "" if cell.has_learned else " †"
    return f"{cell.accuracy:.2f} ± {cell.error:.2f} ({cell.seeds}){mark}"


def _mebibytes(size: float | None) -> str | None:
    return None if size is None else f"{size / 2**20:.0f}"


def control_lines(cells: Cells, tasks: Sequence[str]) -> list[str]:
    """For each task: whether full attention, and which mechanisms, exceed the network in which no token sees another
    by three standard errors of the difference."""
    lines = []
    for task in tasks:
        control = cells.get(CONTROL, {}).get(task)
        if control is None or control.accuracy is None:
            continue
        above = {}
        for name, row in cells.items():
            own = row[task]
            if name != CONTROL and own.accuracy is not None:
                error = math.hypot(own.error or 0.0, control.error or 0.0)
                above[name] = (own.accuracy - control.accuracy) / error if error else 0.0
        best = max(above, key=above.__getitem__, default=None)
        if best is None:
            continue
        clear = sum(value >= 3 for value in above.values())
        verdict = "tells mechanisms apart" if clear else "does NOT tell mechanisms apart at this size"
        full = f", {BASE} by {above[BASE]:.1f}" if BASE in above else ""
        lines.append(
            f"- {task} {verdict}: {clear} of {len(above)} networks exceed {CONTROL} by three standard errors of the "
            f"difference or more; {best} by {above[best]:.1f}{full}."
        )
    return lines


def draw(cells: Cells, tasks: Sequence[str]) -> Figure:
    """A panel for each task and, for several tasks, one for their mean, in which speed and memory are geometric means
    relative to full attention."""
    shown = {task: {name: row[task] for name, row in cells.items()} for task in tasks}
    if len(tasks) > 1:
        shown["mean of the tasks"] = {name: _joined(row, cells.get(BASE)) for name, row in cells.items()}
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axs = panels(rows, columns, (11.5 * columns, 8.5 * rows))
    styles = line_styles(tuple(cells))
    for axes, (title, column) in zip(axs.ravel(), shown.items()):
        _panel(axes, title, column, styles)
    for axes in figure.axes[len(shown) :]:
        axes.set_visible(False)
    return figure


def _joined(row: Mapping[str, Cell], base: Mapping[str, Cell] | None) -> Cell:
    """The mean over the tasks; speed and memory as geometric means, relative to the base."""

    def relative(field: str) -> float | None:
        values = []
        for task, cell in row.items():
            own, whole = getattr(cell, field), None if base is None else getattr(base[task], field)
            if not own or not whole:
                return None
            values.append(math.log(own / whole))
        return math.exp(float(np.mean(values)))

    errors = [cell.error for cell in row.values()]
    error = None if None in errors else math.sqrt(sum(e**2 for e in errors if e is not None)) / len(errors)
    seeds = min(cell.seeds for cell in row.values())
    chance = _mean([cell.chance for cell in row.values()])
    speed, size = relative("steps_per_s"), relative("bytes")
    return Cell(mean_accuracy(row), error, seeds, chance, None, speed, size)


def _panel(
    axes: Axes, title: str, column: Mapping[str, Cell], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    known = {
        name: cell
        for name, cell in column.items()
        if cell.accuracy is not None and cell.steps_per_s and cell.bytes
    }
    if not known:
        axes.set_title(f"{title}: nothing was measured")
        return
    joined = title not in ("listops", "text", "image")
    speeds = np.array([cell.steps_per_s for cell in known.values()])
    accuracies = np.array([cell.accuracy for cell in known.values()])
    sizes = np.array([cell.bytes for cell in known.values()])
    colours = [styles[name]["color"] for name in known]
    low, high = accuracies.min(), accuracies.max()
    margin = 0.08 * max(high - low, 1.0)
    axes.set(xscale="log", ylim=(low - margin, high + margin))
    axes.set_xlim(speeds.min() / 1.3, speeds.max() * 1.3)
    errors = np.array([cell.error or 0.0 for cell in known.values()])
    axes.vlines(speeds, accuracies - errors, accuracies + errors, colors=colours, alpha=0.4, linewidth=1)
    area = 900 * sizes / sizes.max()
    axes.scatter(speeds, accuracies, s=area, c=colours, alpha=0.6, edgecolors="black", linewidths=0.8)
    label_points(
        axes,
        [
            (
                f"{name} ({f'{cell.bytes:.2f} x' if joined else f'{_mebibytes(cell.bytes)} MiB'})",
                x,
                y,
                styles[name]["color"],
            )
            for (name, cell), x, y in zip(known.items(), speeds, accuracies)
        ],
        gap=0.031,
    )
    chance = max(cell.chance or 0.0 for cell in known.values())
    if chance > low - margin:
        axes.axhline(chance, color="#999999", linestyle=":")
    plain_log_axis(axes.xaxis)
    axes.set(
        xlabel=f"training steps a second{f', relative to {BASE} attention' if joined else ''}",
        ylabel="accuracy, %",
        title=f"{title}; area of a bubble: memory of a training step",
    )
