"""What `eval.glue` measures, as a table beside TransNormer's and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import line_styles
from train.data.glue import GLUE_TASKS

# TransNormer (arXiv:2210.10340), table 5: MNLI (matched and mismatched), QNLI, QQP, SST-2, MRPC (F1), CoLA (Matthews),
# the average that the paper prints, and millions of parameters. None: "unconverged".
PAPER: Mapping[str, tuple[float | None, ...]] = {
    "vanilla": (79.37, 79.07, 87.79, 88.04, 90.25, 88.35, 38.63, 78.79, 124.70),
    "FLASH-quad": (78.71, 79.43, 86.36, 88.95, 90.94, 81.73, 41.28, 78.20, 127.11),
    "FLASH": (79.45, 80.08, 87.10, 88.83, 90.71, 82.50, 29.40, 76.87, 127.12),
    "Long-Short": (77.01, 76.78, 84.86, 86.85, 90.25, 82.65, 40.65, 77.01, 128.28),
    "Performer": (58.85, 59.52, 63.44, 79.10, 81.42, 82.11, 19.41, 63.41, 124.70),
    "1 + elu": (74.87, 75.37, 82.59, 86.9, 87.27, 83.03, None, 70.00, 124.0),
    "TransNormer T1": (79.06, 79.93, 87.00, 88.61, 91.17, 84.50, 45.38, 79.38, 124.67),
    "TransNormer T2": (77.28, 78.53, 85.39, 88.56, 90.71, 85.06, 45.90, 78.78, 124.67),
}
_PAPER_COLUMNS = ("MNLI", "MNLI-mm", "QNLI", "QQP", "SST-2", "MRPC", "CoLA", "average", "parameters, M")


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """By network, and by task and metric: the mean in percent, its standard error (of the seeds; 0 of one), and the
    number of seeds."""

    def name(result: Mapping[str, Any]) -> str:
        return f"{result['model']}, {'pretrained' if result['pretrained'] else 'from scratch'}"

    grouped: dict[str, dict[str, list[float]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        for network, runs in alike([r for r in results if r["task"] == task], name).items():
            for metric in runs[0]["metrics"]:
                grouped.setdefault(network, {})[f"{task} {metric}"] = [run[metric] for run in runs]
    return {
        name: {
            column: (
                float(np.mean(v)),
                float(np.std(v, ddof=1) / len(v) ** 0.5) if len(v) > 1 else 0.0,
                len(v),
            )
            for column, v in row.items()
        }
        for name, row in grouped.items()
    }


def _columns(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    order = list(GLUE_TASKS)
    found = {column for row in rows.values() for column in row}
    return sorted(found, key=lambda column: (order.index(column.split()[0]), column))


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The runs, averaged over seeds, then the paper's table."""
    rows = summarise(results)
    columns = _columns(rows)
    lines = [
        "GLUE's dev split, percent ± standard error of the seeds (their number).",
        "",
        f"| network | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name, row in rows.items():
        cells = [f"{row[c][0]:.2f} ± {row[c][1]:.2f} ({row[c][2]})" if c in row else "" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "TransNormer, arXiv:2210.10340, table 5 (RoBERTa's base network, WikiText-103):", ""]
    lines += [f"| network | {' | '.join(_PAPER_COLUMNS)} |", "|---" * (1 + len(_PAPER_COLUMNS)) + "|"]
    for name, figures in PAPER.items():
        cells = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: Sequence[Mapping[str, Any]]) -> Figure:
    """A bar for each network and metric, with the seeds' standard errors."""
    rows = summarise(results)
    columns = _columns(rows)
    figure = Figure(figsize=(max(6.0, 2.2 * len(columns)), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(rows)
    styles = line_styles(list(rows))
    for i, (name, row) in enumerate(rows.items()):
        places = [j + (i - (len(rows) - 1) / 2) * width for j, c in enumerate(columns) if c in row]
        values, errors = zip(*(row[c][:2] for c in columns if c in row))
        axes.bar(places, values, width, yerr=errors, label=name, color=styles[name]["color"], capsize=3)
    axes.set_xticks(range(len(columns)), columns)
    axes.set(ylabel="percent", title="GLUE's dev split")
    axes.grid(True, axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
