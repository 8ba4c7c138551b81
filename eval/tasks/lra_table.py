"""The papers' tables of the Long Range Arena with our runs added, as markdown and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import line_styles
from eval.tasks.lra_figures import AVERAGES, PAPERS
from train.data.lra.tasks import LRA_TASKS

Row = dict[str, str]


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """By model and task: accuracy and standard error in percent, and the number of seeds averaged.

    Runs that differ only in their seed are averaged; where others of one model and task differ in more, the name goes
    on with what that is. The error of an average is that of its runs' test answers, as if they were independent, or the
    spread of the seeds where that is larger."""
    rows: dict[str, dict[str, tuple[float, float, int]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        own = [result for result in results if result["task"] == task]
        for model, runs in alike(own, lambda result: result["model"]).items():
            rows.setdefault(model, {})[task] = _average(runs)
    return rows


def _average(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float, int]:
    accuracies = [100 * run["accuracy"] for run in runs]
    answers = 100 * math.sqrt(sum(run["standard_error"] ** 2 for run in runs)) / len(runs)
    spread = float(np.std(accuracies, ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    return float(np.mean(accuracies)), max(answers, spread), len(runs)


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """A table of the runs with their chance levels, then the papers' tables."""
    ours = summarise(results)
    tasks = [task for task in LRA_TASKS if any(task in row for row in ours.values())]
    chance = {task: max(100 * r["chance"] for r in results if r["task"] == task) for task in tasks}
    rows = [
        {"model": model, **{task: _cell(*row[task]) for task in tasks if task in row}}
        for model, row in ours.items()
    ]
    rows.append({"model": "chance (the most frequent class)", **{t: f"{chance[t]:.2f}" for t in tasks}})
    parts = [
        f"Accuracy on the {results[0]['split']} split, percent ± standard error. Seeds answer the same examples: the "
        "error of one mean alone lies between the one here and that of a single run.",
        "",
        *_table(tasks, rows),
    ]
    data = sorted({f"{r['task']}: {r['data']}, {r['examples']} {r['split']} examples" for r in results})
    parts += ["", *(f"- {line}" for line in data)]
    for paper, figures in PAPERS.items():
        averages = AVERAGES[paper]
        rows = [
            {"model": model, **{t: f"{row[t]:.2f}" for t in LRA_TASKS if t in row}}
            | ({"average": f"{averages[model]:.2f}"} if model in averages else {})
            for model, row in figures.items()
        ]
        columns = [*LRA_TASKS, *(["average"] if averages else [])]
        parts += ["", f"{paper}:", "", *_table(columns, rows)]
        notes = [average_note(model, figures[model], averages[model]) for model in averages]
        parts += [f"- {note}" for note in notes if note is not None]
    return "\n".join(parts)


def average_note(model: str, row: Mapping[str, float], printed: float) -> str | None:
    """What a paper's average is, where it is not the mean of all tasks of its row."""

    def is_printed(mean: float) -> bool:
        return abs(mean - printed) < 0.0101  # the figures are rounded, and so may be their mean

    mean = float(np.mean(list(row.values())))
    if is_printed(mean):
        return None
    for omitted in row:
        if is_printed(float(np.mean([value for task, value in row.items() if task != omitted]))):
            return f"{model}: {printed:.2f} leaves {omitted} out; with it the average is {mean:.2f}."
    return f"{model}: the average of the row is {mean:.2f}, the paper prints {printed:.2f}."


def _cell(accuracy: float, error: float, seeds: int) -> str:
    return f"{accuracy:.2f} ± {error:.2f}" + (f" ({seeds} seeds)" if seeds > 1 else "")


def _table(tasks: Sequence[str], rows: Sequence[Row]) -> list[str]:
    lines = [f"| model | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    return lines + [
        f"| {row['model']} | {' | '.join(row.get(task, '-') for task in tasks)} |" for row in rows
    ]


def draw(results: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each task: our accuracies with their standard errors, the papers' as open marks, chance as a line."""
    ours = summarise(results)
    tasks = [task for task in LRA_TASKS if any(task in row for row in ours.values())]
    columns, rows = min(3, len(tasks)), math.ceil(len(tasks) / 3)
    figure = Figure(figsize=(max(9.0, 4.2 * columns), 3.8 * rows + 2.0), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns)).reshape(-1)
    papers = ("Transformer (our-imp)", "BRL-Former (m = 256)", "TransNormer T2")
    figures = {model: row for table in PAPERS.values() for model, row in table.items()}
    names = list(ours) + [f"paper: {model}" for model in papers]
    styles = line_styles(names)
    for panel, task in zip(panels, tasks):
        for x, (model, row) in enumerate(ours.items()):
            if task in row:
                accuracy, error, _ = row[task]
                style = {**styles[model], "linestyle": "none"}
                panel.errorbar(x, accuracy, yerr=error, label=model, capsize=4, **style)
        for x, model in enumerate(papers, len(ours)):
            if task in figures[model]:
                style = {**styles[f"paper: {model}"], "linestyle": "none", "fillstyle": "none"}
                panel.plot(x, figures[model][task], label=f"paper: {model}", **style)
        chance = max(100 * r["chance"] for r in results if r["task"] == task)
        panel.axhline(chance, color="#999999", linestyle=":", label="chance")
        panel.set(title=task, ylabel="accuracy, %", xticks=[])
        panel.grid(True, axis="y", alpha=0.3)
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    entries = {text: handle for panel in panels for handle, text in zip(*panel.get_legend_handles_labels())}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=2, frameon=False)
    return figure
