"""What `eval.graph` measures, as a table beside BRL-Attention's and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import line_styles
from train.engine.metrics import read_metrics

# BRL-Attention (OpenReview Vpyg3fqXbl), table 4: micro and macro F1.
PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "DBLP": {
        "gcn": (91.47, 90.84),
        "gat": (93.39, 93.83),
        "simple_hgn": (94.46, 94.01),
        "full": (95.33, 94.96),
        "local": (94.96, 94.87),
        "brl": (95.67, 95.35),
    },
    "IMDB": {
        "gcn": (64.82, 57.88),
        "gat": (64.84, 58.94),
        "simple_hgn": (67.36, 63.53),
        "full": (68.81, 65.91),
        "local": (67.93, 65.45),
        "brl": (68.99, 66.29),
    },
    "ACM": {
        "gcn": (92.12, 92.17),
        "gat": (92.19, 92.26),
        "simple_hgn": (93.35, 93.42),
        "full": (93.72, 93.79),
        "local": (93.33, 93.58),
        "brl": (93.78, 93.81),
    },
    "Freebase": {
        "gcn": (60.23, 27.84),
        "gat": (65.26, 40.74),
        "simple_hgn": (67.49, 62.49),
        "full": (68.74, 61.73),
        "local": (67.78, 60.98),
        "brl": (69.54, 61.80),
    },
}
# Its table 5: accuracy.
PAPER_SETS: Mapping[str, Mapping[str, float]] = {
    "20news": {"gcn": 65.98, "gat": 64.06, "full": 64.94, "local": 64.61, "brl": 65.19},
    "mini_imagenet": {"gcn": 85.96, "gat": 85.41, "full": 87.46, "local": 87.17, "brl": 87.55},
}
_SCORES = ("micro_f1", "macro_f1")
_METRICS = (*_SCORES, "step_megabytes")


def paper_figures(dataset: str, network: str) -> tuple[float, ...]:
    """The paper's micro and macro F1 of a network, or its accuracy alone; none where it has none."""
    for name, rows in PAPER.items():
        if name.lower() == dataset.lower():
            return rows.get(network, ())
    found = PAPER_SETS.get(dataset.lower(), {}).get(network)
    return () if found is None else (found,)


def summarise(
    results: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], dict[str, tuple[float, float, int]]]:
    """By data set and network, and by metric: the mean, the standard deviation of the seeds as the paper has it (0 of
    one), and the number of seeds."""
    grouped: dict[tuple[str, str], dict[str, list[float]]] = {}
    for dataset in dict.fromkeys(result["dataset"] for result in results):
        own = [result for result in results if result["dataset"] == dataset]
        for network, runs in alike(own, lambda result: result["network"]).items():
            grouped[dataset, network] = {metric: [run[metric] for run in runs] for metric in _METRICS}
    return {
        name: {
            metric: (float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else 0.0, len(v))
            for metric, v in row.items()
        }
        for name, row in sorted(grouped.items())
    }


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The runs, averaged over seeds, beside the paper's figures."""
    lines = [
        "Test nodes, percent: mean ± standard deviation of the seeds (their number), and in brackets BRL-Attention's "
        "tables 4 and 5; megabytes of temporary memory of a training step.",
        "",
        "| data | network | micro F1 | macro F1 | MB |",
        "|---|---|---|---|---|",
    ]
    for (dataset, network), row in summarise(results).items():
        paper = paper_figures(dataset, network)
        cells = []
        for i, metric in enumerate(_SCORES):
            mean, deviation, seeds = row[metric]
            beside = f" [{paper[i]:.2f}]" if i < len(paper) else ""
            cells.append(f"{mean:.2f} ± {deviation:.2f} ({seeds}){beside}")
        cells.append(f"{row['step_megabytes'][0]:,.0f}")
        lines.append(f"| {dataset} | {network} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Of each data set: micro F1 of the networks, with the paper's figures as black lines; micro F1 by the memory of a
    training step; and the losses on the validation nodes while the transformers train, the mean of the seeds."""
    rows = summarise(results)
    datasets = sorted({dataset for dataset, _ in rows})
    networks = list(dict.fromkeys(network for _, network in sorted(rows, key=lambda name: name[1])))
    styles = line_styles(networks)
    figure = Figure(figsize=(4.2 * len(datasets), 11), layout="constrained")
    axes = figure.subplots(3, len(datasets), squeeze=False)
    for column, dataset in enumerate(datasets):
        here = [network for network in networks if (dataset, network) in rows]
        top, low = axes[0, column], 100.0
        for place, network in enumerate(here):
            mean, deviation, _ = rows[dataset, network]["micro_f1"]
            top.bar(place, mean, 0.7, yerr=deviation, color=styles[network]["color"], capsize=3)
            paper = paper_figures(dataset, network)[:1]
            for figure_of_paper in paper:
                top.plot([place - 0.4, place + 0.4], [figure_of_paper] * 2, color="black")
            low = min(low, mean - deviation, *paper)
        top.set_xticks(range(len(here)), here, rotation=35, ha="right")
        top.set(title=dataset, ylim=(max(low - 3, 0), None))
        top.grid(True, axis="y", alpha=0.3)
        _draw_memory(axes[1, column], {network: rows[dataset, network] for network in here}, styles)
        _draw_losses(axes[2, column], [r for r in results if r["dataset"] == dataset], styles)
    axes[0, 0].set_ylabel("micro F1, percent (lines: the paper)")
    axes[1, 0].set_ylabel("micro F1, percent")
    axes[2, 0].set_ylabel("loss on validation nodes")
    return figure


def _draw_memory(axes: Any, rows: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
    """The networks of one data set by the memory of a training step."""
    for network, row in rows.items():
        (mean, deviation, _), (megabytes, *_) = row["micro_f1"], row["step_megabytes"]
        style = {**styles[network], "linestyle": "none"}
        axes.errorbar(megabytes, mean, yerr=deviation, capsize=3, **style)
        top = (megabytes, mean + deviation)
        axes.annotate(network, top, xytext=(0, 5), textcoords="offset points", ha="center")
    axes.set_xlabel("MB of a training step")
    axes.margins(x=0.2, y=0.15)
    axes.grid(True, alpha=0.3)


def _draw_losses(axes: Any, results: Sequence[Mapping[str, Any]], styles: Mapping[str, Any]) -> None:
    """The losses of the transformers of one data set, up to the step that all seeds reached."""
    curves: dict[str, list[dict[int, float]]] = {}
    for result in results:
        written = (Path(result["workdir"]) / "metrics.jsonl").is_file()
        if result["network"] in ("brl", "local", "full") and written:
            lines = read_metrics(result["workdir"])
            losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
            curves.setdefault(result["network"], []).append(losses)
    for network, seeds in curves.items():
        steps = sorted(set.intersection(*(set(losses) for losses in seeds)))
        means = [np.mean([losses[step] for losses in seeds]) for step in steps]
        axes.plot(steps, means, label=network, **styles[network])
    axes.set(xlabel="step")
    axes.grid(True, alpha=0.3)
    if curves:
        axes.legend(frameon=False)
