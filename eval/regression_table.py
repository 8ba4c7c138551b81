"""Runs of in-context regression as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.plotting import legend_outside, line_styles
from train.data.in_context import one_step_errors

Result = Mapping[str, Any]

# What runs have in common that differ only in their seed.
_SAME = ("model", "num_heads", "d_model", "num_layers", "input_dim", "prompt", "learning_rate", "batch")


def label(result: Result) -> str:
    """A run's mechanism and number of heads."""
    heads = result["num_heads"]
    return f"{result['model']}, {heads} head{'s' if heads > 1 else ''}"


def grouped(results: Sequence[Result]) -> list[list[Result]]:
    """The runs, grouped where they differ only in their seed; ordered by width within a mechanism."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault((*(result[name] for name in _SAME), len(result["errors"])), []).append(result)
    return sorted(groups.values(), key=lambda runs: (label(runs[0]), runs[0]["d_model"], runs[0]["batch"]))


def _spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed, and for what they are compared with."""
    lines = [
        "| mechanism | width | head | batch | parameters | TFLOP | seconds | seeds | error | error of the last |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for runs in grouped(results):
        first = runs[0]
        flops = [run["flops_per_step"] * run["curve"]["step"][-1] / 1e12 for run in runs]
        seconds = [run["curve"]["seconds"][-1] for run in runs]
        lines.append(
            f"| {label(first)} | {first['d_model']} | {first['d_model'] // first['num_heads']} "
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
    """Four panels: the error by pairs seen, by width, and while training by operations and by seconds."""
    groups = grouped(results)
    figure = Figure(figsize=(14, 9), layout="constrained")
    (by_pairs, by_width), (by_flops, by_time) = figure.subplots(2, 2)
    many_widths = len({run["d_model"] for run in results}) > 1
    many_batches = len({run["batch"] for run in results}) > 1

    def name_of(run: Result) -> str:
        width = f", width {run['d_model']}" if many_widths else ""
        return label(run) + width + (f", batch {run['batch']}" if many_batches else "")

    names = {id(runs): name_of(runs[0]) for runs in groups}
    styles = line_styles([names[id(runs)] for runs in groups])
    for runs in groups:
        style = {**styles[names[id(runs)]], "markersize": 4}
        errors = np.mean([run["errors"] for run in runs], axis=0)
        by_pairs.plot(errors, label=names[id(runs)], markevery=max(1, len(errors) // 8), **style)
        for i, run in enumerate(runs):
            curve, name = run["curve"], names[id(runs)] if i == 0 else None
            flops = np.asarray(curve["step"]) * run["flops_per_step"]
            by_flops.plot(flops, curve["error"], label=name, **style)
            by_time.plot(curve["seconds"], curve["error"], label=name, **style)
    best = {len(run["least_squares"]): run["least_squares"] for run in results}
    for errors in best.values():
        by_pairs.plot(errors, color="#999999", linestyle=":", label="least squares")
    steps = [one_step_errors(*kind) for kind in {(run["input_dim"], len(run["errors"])) for run in results}]
    for errors in steps:
        by_pairs.plot(errors, color="#999999", linestyle="--", label="one step of gradient descent")
    series: dict[Any, list[tuple[int, float]]] = {}
    for runs in groups:
        points = [(run["d_model"], run["error"]) for run in runs]
        series.setdefault((label(runs[0]), runs[0]["batch"]), []).extend(points)
        by_width.plot(*zip(*points), **{**styles[names[id(runs)]], "linestyle": "none"})
    for points in series.values():
        by_width.plot(*zip(*sorted(points)), color="#bbbbbb", linewidth=0.8, zorder=0)
    floor = {run["least_squares_error"] for run in results}
    for axes in (by_width, by_flops, by_time):
        for value in floor:
            axes.axhline(value, color="#999999", linestyle=":", label="least squares")
        for errors in steps:
            axes.axhline(errors.mean(), color="#999999", linestyle="--", label="one step of gradient descent")
    by_pairs.set(xlabel="pairs seen", ylabel="squared error", title="on test prompts")
    widths = sorted({run["d_model"] for run in results})
    by_width.set(xlabel="width", ylabel="squared error, all pairs", title="on test prompts", xticks=widths)
    by_flops.set(xlabel="floating-point operations of training", ylabel="held-out squared error, all pairs")
    by_time.set(xlabel="seconds of training", ylabel="held-out squared error, all pairs")
    by_flops.set_xscale("log")
    by_time.set_xscale("log")
    for axes in (by_pairs, by_width, by_flops, by_time):
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    legend_outside(by_time)
    return figure
