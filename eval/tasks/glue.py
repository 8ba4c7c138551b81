"""Measures a fine-tuned network on a task of GLUE: python -m eval.glue --workdir DIR.

The task's own metrics on GLUE's dev split, in percent. --table DIR [--picture FILE.png] averages the runs under DIR
that differ only in their seed, and prints them together with the figures of TransNormer (arXiv:2210.10340, table 5). Of
runs that differ in their learning rate as well, the table has the best rate's, as the paper's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.output import Measured
from eval.harness.pictures import line_styles, panels
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, mean_deviation, plus_minus
from train.cli.summary import mechanism_names
from train.data.glue import GLUE_TASKS
from train.engine.errors import UserError
from train.tasks.glue import GLUE

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


def task_metrics(task: str, predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The metrics of a task in percent, by name. The correlation of constant predictions counts as 0."""
    try:
        from sklearn import metrics as sklearn_metrics
    except ModuleNotFoundError as error:
        raise UserError("eval.glue needs scikit-learn: pip install -e '.[glue]'") from error
    from scipy import stats

    def correlation(function: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.ConstantInputWarning)
            return float(np.nan_to_num(function(predicted, true).statistic))

    functions = {
        "accuracy": lambda: sklearn_metrics.accuracy_score(true, predicted),
        "f1": lambda: sklearn_metrics.f1_score(true, predicted),
        "matthews": lambda: sklearn_metrics.matthews_corrcoef(true, predicted),
        "pearson": lambda: correlation(stats.pearsonr),
        "spearman": lambda: correlation(stats.spearmanr),
    }
    return {name: 100.0 * float(functions[name]()) for name in GLUE_TASKS[task].metrics}


def measure(run: Run, options: TableOptions) -> dict[str, Any]:
    """The metrics of a run. If a task has several splits, each name ends with the split."""
    config = run.config
    name = config.data.task
    found: dict[str, Mapping[str, float]] = {}
    for split in GLUE_TASKS[name].tests:
        data = GLUE.load(config, (split,))
        found[split] = task_metrics(name, *GLUE.predict(config, run.model, run.params, data, split))
        examples = len(data[split])
    measured = {
        metric if len(found) == 1 else f"{metric}_{split.removeprefix('dev_')}": value
        for split, metrics in found.items()
        for metric, value in metrics.items()
    }
    return {
        "task": name,
        **measured,
        "metrics": list(measured),
        "examples": examples,
        "model": mechanism_names(config.model),
        "pretrained": not config.from_scratch,
        "learning_rate": config.optimizer.learning_rate,
        "steps": config.loop.steps,
        **run_facts(run),
    }


def best_rates(measured: list[Measured]) -> list[Measured]:
    """Of the runs of a network on a task, those with the learning rate whose mean over the seeds is best, by the first
    of the task's metrics."""
    groups: dict[str, dict[float, list[Measured]]] = {}
    for each in measured:
        others = {k: v for k, v in each.result["configuration"].items() if k != "optimizer.learning_rate"}
        rates = groups.setdefault(json.dumps([each.result["task"], others], sort_keys=True), {})
        rates.setdefault(each.result["learning_rate"], []).append(each)

    def mean(runs: list[Measured]) -> float:
        return float(np.mean([run.result[run.result["metrics"][0]] for run in runs]))

    return [run for rates in groups.values() for run in max(rates.values(), key=mean)]


def summarise(results: Sequence[Result]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """By network, and by task and metric: the mean in percent, its standard error over the seeds (0 for one seed), and
    the number of seeds."""

    def name(result: Result) -> str:
        return f"{result['model']}, {'pretrained' if result['pretrained'] else 'from scratch'}"

    rows: dict[str, dict[str, tuple[float, float, int]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        for network, runs in alike([r for r in results if r["task"] == task], name).items():
            for metric in runs[0]["metrics"]:
                mean, deviation, count = mean_deviation([run[metric] for run in runs])
                rows.setdefault(network, {})[f"{task} {metric}"] = mean, deviation / count**0.5, count
    return rows


def _columns(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    order = list(GLUE_TASKS)
    found = {column for row in rows.values() for column in row}
    return sorted(found, key=lambda column: (order.index(column.split()[0]), column))


def markdown(results: Sequence[Result]) -> str:
    """The runs, averaged over seeds, then the paper's table."""
    rows = summarise(results)
    columns = _columns(rows)
    ours = Table(
        "network", *columns, title="GLUE's dev split, percent ± standard error of the seeds (their number)."
    )
    for name, row in rows.items():
        cells = [f"{plus_minus(*row[c])} ({row[c][2]})" if c in row else "" for c in columns]
        ours.add(name, *cells)
    title = "TransNormer, arXiv:2210.10340, table 5 (RoBERTa's base network, WikiText-103):"
    paper = Table("network", *_PAPER_COLUMNS, title=title)
    for name, figures in PAPER.items():
        paper.add(name, *(None if figure is None else f"{figure:.2f}" for figure in figures))
    return f"{ours}\n\n{paper}"


def draw(results: Sequence[Result]) -> Figure:
    """A bar for each network and metric, with the seeds' standard errors."""
    rows = summarise(results)
    columns = _columns(rows)
    figure, [[axes]] = panels(1, 1, (max(6.0, 2.2 * len(columns)), 5), grid="y")
    width = 0.8 / len(rows)
    styles = line_styles(list(rows))
    for i, (name, row) in enumerate(rows.items()):
        places = [j + (i - (len(rows) - 1) / 2) * width for j, c in enumerate(columns) if c in row]
        values, errors = zip(*(row[c][:2] for c in columns if c in row))
        axes.bar(places, values, width, yerr=errors, label=name, color=styles[name]["color"], capsize=3)
    axes.set_xticks(range(len(columns)), columns)
    axes.set(ylabel="percent", title="GLUE's dev split")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


main = Evaluation(
    [GLUE], TableOptions(), "eval.glue", "Measures fine-tuned networks on GLUE.", measure, markdown, draw,
    kept="glue_test.json", select=best_rates,
).main  # fmt: skip
