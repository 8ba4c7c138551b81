"""Runs of in-context regression as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import label_points, line_styles, plain_log_axis
from train.data.in_context import one_step_errors

Result = Mapping[str, Any]


def label(result: Result) -> str:
    """A run's mechanism and number of heads."""
    heads = result["num_heads"]
    return f"{result['model']}, {heads} head{'s' if heads > 1 else ''}"


def grouped(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The runs, grouped where they differ only in their seed; ordered by width within a mechanism. Each group has its
    label, which goes on with the settings in which it differs from others of its width and batch."""

    def place(result: Result) -> str:
        return f"{label(result)}, width {result['d_model']}, batch {result['batch']}"

    groups = [
        (label(runs[0]) + name.removeprefix(place(runs[0])), runs)
        for name, runs in alike(results, place).items()
    ]
    return sorted(
        groups, key=lambda each: (label(first := each[1][0]), first["d_model"], first["batch"], each[0])
    )


def _spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed, and for what they are compared with."""
    lines = [
        "| mechanism | width | head | batch | parameters | TFLOP | seconds | seeds | error | error of the last |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in grouped(results):
        first = runs[0]
        flops = [run["flops_per_step"] * run["curve"]["step"][-1] / 1e12 for run in runs]
        seconds = [run["curve"]["seconds"][-1] for run in runs]
        lines.append(
            f"| {name} | {first['d_model']} | {first['d_model'] // first['num_heads']} "
            f"| {first['batch']} | {first['parameters']} "
            f"| {np.mean(flops):.1f} | {np.mean(seconds):.0f} | {', '.join(str(run['seed']) for run in runs)} "
            f"| {_spread([run['error'] for run in runs])} | {_spread([run['errors'][-1] for run in runs])} |"
        )
    kinds = {(run["input_dim"], len(run["errors"])): run for run in results}
    for (dims, pairs), run in sorted(kinds.items()):
        lines.append(
            f"| least squares, {dims} inputs, {pairs} pairs | - | - | - | - | - | - | - "
            f"| {run['least_squares_error']:.3f} | {run['least_squares'][-1]:.3f} |"
        )
        errors = one_step_errors(dims, pairs)
        lines.append(
            f"| one step of gradient descent, {dims} inputs, {pairs} pairs | - | - | - | - | - | - | - "
            f"| {errors.mean():.3f} | {errors[-1]:.3f} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Figure:
    """Four panels: the error by pairs seen, by width, and while training by operations and by seconds. Names stand at
    the ends of the curves."""
    groups = grouped(results)
    figure = Figure(figsize=(15, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    (by_pairs, by_width), (by_flops, by_time) = panels
    for axes in (by_flops, by_time):
        axes.set_xscale("log")
        plain_log_axis(axes.xaxis)
    many_widths = len({run["d_model"] for run in results}) > 1
    many_batches = len({run["batch"] for run in results}) > 1

    def name_of(title: str, run: Result, width: bool) -> str:
        width_words = f", width {run['d_model']}" if width else ""
        return title + width_words + (f", batch {run['batch']}" if many_batches else "")

    styles = line_styles([name_of(title, runs[0], many_widths) for title, runs in groups])
    # For each panel, the points that are named: the ends of curves.
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {axes: [] for axes in panels.ravel()}
    by_mechanism: dict[str, list[tuple[int, float, str]]] = {}
    for title, runs in groups:
        name = name_of(title, runs[0], many_widths)
        style = {**styles[name], "markersize": 4}
        colour = style["color"]
        errors = np.mean([run["errors"] for run in runs], axis=0)
        by_pairs.plot(errors, markevery=max(1, len(errors) // 8), **style)
        ends[by_pairs].append((name, len(errors) - 1, errors[-1], colour))
        for i, run in enumerate(runs):
            curve = run["curve"]
            tflops = np.asarray(curve["step"]) * run["flops_per_step"] / 1e12
            for axes, x in ((by_flops, tflops), (by_time, curve["seconds"])):
                axes.plot(x, curve["error"], **style)
                if i == 0:
                    ends[axes].append((name, x[-1], curve["error"][-1], colour))
        points = [(run["d_model"], run["error"]) for run in runs]
        by_mechanism.setdefault(name_of(title, runs[0], False), []).extend(
            (*point, colour) for point in points
        )
        by_width.plot(*zip(*points), **{**style, "linestyle": "none"})
    for name, named in by_mechanism.items():
        named.sort()
        by_width.plot(*zip(*((x, y) for x, y, _ in named)), color="#bbbbbb", linewidth=0.8, zorder=0)
        ends[by_width].append((name, *named[-1]))
    _draw_references(results, by_pairs, (by_width, by_flops, by_time), ends)
    by_pairs.set(xlabel="pairs seen", ylabel="squared error", title="on test prompts")
    widths = sorted({run["d_model"] for run in results})
    by_width.set(xlabel="width", ylabel="squared error, all pairs", title="on test prompts", xticks=widths)
    by_flops.set(xlabel="TFLOP of training", ylabel="held-out squared error, all pairs")
    by_time.set(xlabel="seconds of training", ylabel="held-out squared error, all pairs")
    for axes in panels.ravel():
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
        label_points(axes, ends[axes], gap=0.055, fontsize=9)
    return figure


def _draw_references(
    results: Sequence[Result],
    by_pairs: Axes,
    others: Sequence[Axes],
    ends: dict[Axes, list[tuple[str, float, float, str]]],
) -> None:
    """Draws what runs are compared with, grey, as curves by pairs and as levels elsewhere, and adds where they end."""
    floors = {len(run["errors"]): (run["least_squares"], run["least_squares_error"]) for run in results}
    kinds = {(run["input_dim"], len(run["errors"])) for run in results}
    references = [("least squares", ":", curve, mean) for curve, mean in floors.values()]
    references += [
        ("one step of gradient descent", "--", errors, errors.mean())
        for errors in (one_step_errors(*kind) for kind in sorted(kinds))
    ]
    for name, dashes, curve, mean in references:
        by_pairs.plot(curve, color="#777777", linestyle=dashes)
        ends[by_pairs].append((name, len(curve) - 1, curve[-1], "#777777"))
        for axes in others:
            axes.axhline(mean, color="#777777", linestyle=dashes)
            # A level ends at the edge of the panel, whose limits curves have set.
            ends[axes].append((name, axes.get_xlim()[1], mean, "#777777"))
