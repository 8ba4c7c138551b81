"""Measures networks that classify the nodes of a graph (train.graph): python -m eval.graph --workdir DIR [OPTIONS].

Micro and macro F1 of the test nodes in percent (where a node has one class, micro F1 is the accuracy), and the
temporary memory in megabytes of a training step's gradients by the compiler. --table DIR [--picture FILE.png] averages
the runs under DIR that differ only in their seed, and prints them together with the figures of BRL-Attention
(OpenReview Vpyg3fqXbl, tables 4 and 5). The picture has scores, scores by memory (figure 8) and losses (figure 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.pictures import line_styles, panels
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, mean_deviation, plus_minus
from eval.tasks.paper_tables.graphs import TABLES
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.engine.metrics import read_metrics
from train.tasks.graph import GRAPH, GraphData

_SCORES = ("micro_f1", "macro_f1")
_METRICS = (*_SCORES, "step_megabytes")


def f1_scores(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Micro and macro F1 in percent of classes (N,), or of (N, C) zeros and ones where a node may have several."""
    try:
        from sklearn.metrics import f1_score
    except ModuleNotFoundError as error:
        raise UserError("eval.graph needs scikit-learn: pip install -e '.[graph]'") from error
    return {
        f"{average}_f1": 100.0 * float(f1_score(true, predicted, average=average, zero_division=0))
        for average in ("micro", "macro")
    }


def step_megabytes(run: Run, data: GraphData) -> float:
    """The temporary memory of the gradients of a microbatch, as this machine's compiler plans it: what a training step
    needs in addition to parameters and batch."""
    objective = run.task.objective(run.model, run.config)
    batch = next(iter(run.task.held_out(run.config, data, "valid")))
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.arrays.items()}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return objective.loss(params, None, batch, key)[0]

    step = jax.jit(jax.grad(loss)).lower(params, arrays, jax.random.key(0)).compile()
    memory: Any = step.memory_analysis()
    return memory.temp_size_in_bytes / 1e6


def measure(run: Run, options: TableOptions) -> dict[str, Any]:
    """The F1 scores of a run."""
    config = run.config
    data = GRAPH.load(config, ("valid", "test"))
    predicted, true = GRAPH.predict(config, run.model, run.params, data, "test")
    return {
        "dataset": Path(config.data.data_dir).stem,
        "network": mechanism_names(config.model),
        **f1_scores(predicted, true),
        "nodes": len(true),
        "tokens": len(config.model.kinds),
        "step_megabytes": step_megabytes(run, data),
        "learning_rate": config.optimizer.learning_rate,
        **run_facts(run),
    }


def paper_figures(dataset: str, network: str) -> tuple[float, ...]:
    """The paper's micro and macro F1 of a network, its accuracy alone, or nothing."""
    for number in (4, 5):
        table = TABLES.get(f"brl-{number}-{dataset.lower()}")
        for preset, *figures in table.rows.values() if table else ():
            if str(preset).partition("-")[2] == network:
                return tuple(float(figure) for figure in figures if figure is not None)
    return ()


def summarise(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, tuple[float, float, int]]]:
    """By data set and network, and by metric: the mean, the standard deviation over the seeds as in the paper (0 for
    one seed), and the number of seeds."""
    rows = {}
    for dataset in sorted({result["dataset"] for result in results}):
        own = [result for result in results if result["dataset"] == dataset]
        for network, runs in sorted(alike(own, lambda result: result["network"]).items()):
            found = {metric: mean_deviation([run[metric] for run in runs]) for metric in _METRICS}
            rows[dataset, network] = found
    return rows


def markdown(results: Sequence[Result]) -> str:
    """The runs, averaged over seeds, with the paper's figures."""
    table = Table(
        "data", "network", "micro F1", "macro F1", "MB",
        title="Test nodes, percent: mean ± standard deviation of the seeds (their number), and in brackets "
        "BRL-Attention's tables 4 and 5; megabytes of temporary memory of a training step.",
    )  # fmt: skip
    for (dataset, network), row in summarise(results).items():
        paper = paper_figures(dataset, network)
        cells = []
        for i, metric in enumerate(_SCORES):
            theirs = f" [{paper[i]:.2f}]" if i < len(paper) else ""
            cells.append(f"{plus_minus(*row[metric])} ({row[metric][2]}){theirs}")
        table.add(dataset, network, *cells, f"{row['step_megabytes'][0]:,.0f}")
    return str(table)


def draw(results: Sequence[Result]) -> Figure:
    """For each data set: micro F1 of the networks, with the paper's figures as black lines; micro F1 by the memory of a
    training step; and the losses on the validation nodes while the transformers train, averaged over the seeds."""
    rows = summarise(results)
    datasets = sorted({dataset for dataset, _ in rows})
    networks = list(dict.fromkeys(network for _, network in sorted(rows, key=lambda name: name[1])))
    styles = line_styles(networks)
    figure, axs = panels(3, len(datasets), (4.2 * len(datasets), 11))
    for column, dataset in enumerate(datasets):
        here = [network for network in networks if (dataset, network) in rows]
        top, low = axs[0, column], 100.0
        for place, network in enumerate(here):
            mean, deviation, _ = rows[dataset, network]["micro_f1"]
            top.bar(place, mean, 0.7, yerr=deviation, color=styles[network]["color"], capsize=3)
            paper = paper_figures(dataset, network)[:1]
            for figure_of_paper in paper:
                top.plot([place - 0.4, place + 0.4], [figure_of_paper] * 2, color="black")
            low = min(low, mean - deviation, *paper)
        top.grid(False, axis="x")
        top.set_xticks(range(len(here)), here, rotation=35, ha="right")
        top.set(title=dataset, ylim=(max(low - 3, 0), None))
        _draw_memory(axs[1, column], {network: rows[dataset, network] for network in here}, styles)
        _draw_losses(axs[2, column], [r for r in results if r["dataset"] == dataset], styles)
    axs[0, 0].set_ylabel("micro F1, percent (lines: the paper)")
    axs[1, 0].set_ylabel("micro F1, percent")
    axs[2, 0].set_ylabel("loss on validation nodes")
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


def _draw_losses(axes: Any, results: Sequence[Result], styles: Mapping[str, Any]) -> None:
    """The losses of the transformers of one data set at the steps that all seeds have evaluated."""
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
    if curves:
        axes.legend(frameon=False)


main = Evaluation(
    [GRAPH], TableOptions(), "eval.graph", "Measures networks that classify nodes.", measure, markdown, draw,
    kept="graph_test.json",
).main  # fmt: skip
