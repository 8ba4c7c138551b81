"""Runs of copying as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from eval.harness.pictures import line_styles, shared_legend
from eval.tasks.recall_table import Result, grouped, percent

_MEASURES = {"token_accuracy": "tokens", "sequence_accuracy": "whole targets"}


def _values(runs: Sequence[Result], length: int, measure: str) -> list[float]:
    return [case[measure] for run in runs for case in run["cases"] if case["length"] == length]


def _lengths(results: Sequence[Result]) -> list[int]:
    return sorted({case["length"] for result in results for case in result["cases"]})


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ in their seed only."""
    lengths = _lengths(results)
    lines = [
        "Right tokens / right targets in percent by length of the source, written greedily: mean over the seeds "
        "(lowest to highest).",
        "",
        "| mechanism | parameters | trained to | seeds | " + " | ".join(map(str, lengths)) + " |",
        "|---" * (4 + len(lengths)) + "|",
    ]
    for label, runs in grouped(results).items():
        cells = []
        for length in lengths:
            found = [_values(runs, length, measure) for measure in _MEASURES]
            cells.append(" / ".join(map(percent, found)) if found[0] else "-")
        seeds = ", ".join(str(run["seed"]) for run in runs)
        lines.append(
            f"| {label} | {runs[0]['parameters']} | {runs[0]['trained']} | {seeds} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Figure:
    """Accuracy by token and by target against the length; the vertical lines are the longest lengths of training."""
    groups = grouped(results)
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    styles = line_styles(list(groups))
    for axes, (measure, name) in zip(panels, _MEASURES.items()):
        for label, runs in groups.items():
            lengths = _lengths(runs)
            means = [100 * float(np.mean(_values(runs, length, measure))) for length in lengths]
            axes.plot(lengths, means, label=label, markersize=6, **styles[label])
        for trained in sorted({result["trained"] for result in results}):
            axes.axvline(trained, color="#999999", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_lengths(results), [str(length) for length in _lengths(results)])
        axes.set(xlabel="length of the source", ylabel="accuracy, %", ylim=(-2, 102), title=name)
        axes.grid(True, alpha=0.3)
    shared_legend(figure, panels[0])
    return figure
