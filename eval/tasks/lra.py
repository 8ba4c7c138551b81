"""Measures classifiers of the Long Range Arena on their test split: python -m eval.lra --workdir DIR.

Accuracy with its standard error, chance (the accuracy of always answering the most frequent class), how many standard
errors lie between them, and the balance of the classes. --table DIR [--picture FILE.png] prints the runs under DIR and
the papers' tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.figure import Figure

from brl_jax.layers import BRLConfig, DiagConfig, LocalConfig, NormConfig
from brl_jax.models import StackConfig
from eval.harness.groups import alike
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.pictures import line_styles, panels
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, mean_deviation
from eval.tasks.paper_tables.lra import NOTES, PAPERS
from train.cli.summary import mechanism_names
from train.data.lra.tasks import LRA_TASKS
from train.tasks.lra import LRA

KEPT = "lra_test.json"
"""The file of a run's folder that keeps its measures on the test split."""


@dataclasses.dataclass(frozen=True)
class LraEvalOptions(TableOptions):
    """What to measure."""

    split: Literal["valid", "test"] = "test"
    """Which part of the data."""


def _window(mechanism: BRLConfig | LocalConfig) -> str:
    """The keys that a token sees: w = 64, or 7 x 7 in two dimensions."""
    if mechanism.pattern == "neighbourhood":
        side = 2 * (mechanism.window // 2) + 1
        return f"{side} x {side}"
    pattern = "" if mechanism.pattern == "sliding" else f", {mechanism.pattern}"
    return f"w = {mechanism.window}{pattern}"


def label(model: StackConfig) -> str:
    """A model's name in the tables: the mechanism and what the papers vary."""
    match model.mechanism, model.late_mechanism:
        case BRLConfig(num_compressed=0) as m, None:
            return f"BRL, m = 0 (local), {_window(m)}"
        case BRLConfig() as m, None:
            memory = "" if m.memory == BRLConfig.memory else f", {m.memory} memory"
            without = ", without difference" if m.gamma == 0 else ""
            return f"BRL, {_window(m)}, m = {m.num_compressed}{memory}{without}"
        case LocalConfig() as m, None:
            return f"local, {_window(m)}"
        case DiagConfig(score="softmax"), NormConfig(feature_map="elu+1"):
            return "TransNormer T2"
        case DiagConfig(score="relu"), NormConfig(feature_map="elu"):
            return "TransNormer T1"
    return mechanism_names(model)


def measure(run: Run, options: LraEvalOptions) -> dict[str, Any]:
    """The accuracy of a run, and facts about the run."""
    config = run.config
    data = run.task.load(config, (options.split,))
    return {
        "task": config.data.task,
        "model": label(config.model),
        **run.task.measure(config, run.model, run.params, data, options.split),
        "data": data.source.name,
        "split": options.split,
        **run_facts(run),
    }


def summarise(results: Sequence[Result]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """By model and task: accuracy and standard error in percent, and the number of seeds averaged.

    Runs that differ only in their seed are averaged; `alike` names the rest apart. The error of an average comes from
    its runs' test answers, as if they were independent, or from the spread of the seeds if that is larger.
    """
    rows: dict[str, dict[str, tuple[float, float, int]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        own = [result for result in results if result["task"] == task]
        for model, runs in alike(own, lambda result: result["model"]).items():
            rows.setdefault(model, {})[task] = _average(runs)
    return rows


def _average(runs: Sequence[Result]) -> tuple[float, float, int]:
    mean, deviation, count = mean_deviation([100 * run["accuracy"] for run in runs])
    answers = 100 * math.sqrt(sum(run["standard_error"] ** 2 for run in runs)) / count
    return mean, max(answers, deviation / math.sqrt(count)), count


def _chance(results: Sequence[Result], task: str) -> float:
    return max(100 * result["chance"] for result in results if result["task"] == task)


def _tasks(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tasks of these rows in the papers' order."""
    return [task for task in LRA_TASKS if any(task in row for row in rows.values())]


def markdown(results: Sequence[Result]) -> str:
    """A table of the runs with their chance levels, then the papers' tables."""
    ours = summarise(results)
    tasks = _tasks(ours)
    table = Table(
        "model", *tasks,
        title=f"Accuracy on the {results[0]['split']} split, percent ± standard error. Seeds answer the same examples: "
        "the error of one mean alone lies between the one here and the error of a single run.",
    )  # fmt: skip
    for model, row in ours.items():
        table.add(model, *(_cell(*row[task]) if task in row else None for task in tasks))
    table.add("chance (the most frequent class)", *(f"{_chance(results, task):.2f}" for task in tasks))
    data = sorted({f"{r['task']}: {r['data']}, {r['examples']} {r['split']} examples" for r in results})
    parts = [str(table), "", *(f"- {line}" for line in data)]
    for paper, figures in PAPERS.items():
        averages = any(row.average is not None for row in figures.values())
        columns = (*LRA_TASKS, *(["average"] if averages else []), "train.lra lra-TASK-")
        table = Table("model", *columns, title=f"{paper}:")
        for model, given in figures.items():
            cells = [given.accuracies.get(task) for task in LRA_TASKS] + ([given.average] if averages else [])
            printed = (None if number is None else f"{number:.2f}" for number in cells)
            table.add(model, *printed, given.preset)
        parts += ["", str(table)]
        parts += [f"- {note}" for note in NOTES.get(paper, ())]
    return "\n".join(parts)


def _cell(accuracy: float, error: float, seeds: int) -> str:
    return f"{accuracy:.2f} ± {error:.2f}" + (f" ({seeds} seeds)" if seeds > 1 else "")


def draw(results: Sequence[Result]) -> Figure:
    """A panel for each task: our accuracies with their standard errors, the papers' as open marks, chance as a line."""
    ours = summarise(results)
    tasks = _tasks(ours)
    columns, rows = min(3, len(tasks)), math.ceil(len(tasks) / 3)
    figure, axs = panels(rows, columns, (max(9.0, 4.2 * columns), 3.8 * rows + 2.0), grid="y")
    papers = ("Transformer (our-imp)", "BRL-Former (m = 256)", "TransNormer T2")
    figures = {model: row.accuracies for table in PAPERS.values() for model, row in table.items()}
    styles = line_styles(list(ours) + [f"paper: {model}" for model in papers])
    for panel, task in zip(axs.ravel(), tasks):
        for x, (model, row) in enumerate(ours.items()):
            if task in row:
                accuracy, error, _ = row[task]
                style = {**styles[model], "linestyle": "none"}
                panel.errorbar(x, accuracy, yerr=error, label=model, capsize=4, **style)
        for x, model in enumerate(papers, len(ours)):
            if task in figures[model]:
                style = {**styles[f"paper: {model}"], "linestyle": "none", "fillstyle": "none"}
                panel.plot(x, figures[model][task], label=f"paper: {model}", **style)
        panel.axhline(_chance(results, task), color="#999999", linestyle=":", label="chance")
        panel.set(title=task, ylabel="accuracy, %", xticks=[])
    for panel in axs.ravel()[len(tasks) :]:
        panel.set_axis_off()
    entries = {t: handle for panel in axs.ravel() for handle, t in zip(*panel.get_legend_handles_labels())}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=2, frameon=False)
    return figure


EVALUATION = Evaluation(
    [LRA], LraEvalOptions(), "eval.lra", "Measures runs on the Long Range Arena.", measure, markdown, draw,
    kept=KEPT,
)  # fmt: skip
main = EVALUATION.main


def measure_run(workdir: str) -> dict[str, Any]:
    """Measures a run on the test split and keeps the result in its folder."""
    return EVALUATION.measure_and_keep(workdir, LraEvalOptions()).result
