"""Compares in-context regression with least squares: python -m eval.regression --workdir DIR.

The squared error by the number of pairs seen before (`errors` of the model, and `least_squares`, both averaged over
fresh functions), their means, and the operations and seconds of training. --table DIR [--picture FILE.png] prints a
table of the runs under DIR, and draws the error by pairs, against the width, and against the operations and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brl_jax.models import Regressor
from eval.harness.groups import alike
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.pictures import label_points, line_styles, panels, plain_log_axis
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, mean_range, seeds
from train.cli.summary import mechanism_names
from train.data.in_context import one_step_errors
from train.engine.errors import UserError
from train.engine.flops import matrix_flops
from train.engine.metrics import read_metrics
from train.tasks.regression import REGRESSION, RegressionConfig

_GREY = "#777777"
_GRADIENT = "one step of gradient descent"


def training_flops(config: RegressionConfig, model: Regressor) -> float:
    """Floating-point operations of the matrix products of one training step, without the input and output projections,
    which are the same for all mechanisms (arXiv:2509.07963, section 4)."""
    rows = config.loop.microbatch
    objective = REGRESSION.objective(model, config)
    batch = REGRESSION.batch_shapes(config, rows)
    params = nn.unbox(jax.eval_shape(objective.init, jax.random.key(0)))

    def loss(params: Any, batch: Any) -> Any:
        return objective.loss(params, None, batch, None)[0]

    total = matrix_flops(jax.jit(jax.grad(loss)).trace(params, batch).jaxpr, "cpu")
    tokens = rows * model.config.max_length
    # The forward pass and the weights' gradient; for the read-out its inputs' gradient too.
    maps = 2 * model.config.num_inputs + 3 * model.config.num_outputs
    return (total - 2.0 * tokens * model.config.d_model * maps) * config.loop.accumulation


def read_curve(workdir: str, pairs: int) -> dict[str, list[float]]:
    """For each evaluation while training: the steps and the seconds so far, by the pairs of a batch and the rate in
    metrics.jsonl, and the held-out error."""
    lines = read_metrics(workdir)
    if not any("val_loss" in line for line in lines):
        raise UserError(f"--workdir: {workdir}/metrics.jsonl has no evaluation")
    rates = [line["tokens_per_second"] for line in lines]
    # The first call compiles the program, and all of its steps have its rate.
    first = next((i for i, rate in enumerate(rates) if rate != rates[0]), 0)
    rates[:first] = [rates[first]] * first
    seconds = np.cumsum([pairs / rate for rate in rates])
    measured = [i for i, line in enumerate(lines) if "val_loss" in line]
    return {
        "step": [lines[i]["step"] for i in measured],
        "seconds": [float(seconds[i]) for i in measured],
        "error": [lines[i]["val_loss"] for i in measured],
    }


def measure(run: Run, options: TableOptions) -> dict[str, Any]:
    """The errors of a run on test prompts, and facts about the run."""
    config = run.config
    return {
        "model": mechanism_names(config.model),
        "num_heads": config.model.num_heads,
        "d_model": config.model.d_model,
        "num_layers": config.model.num_layers,
        "input_dim": config.data.input_dim,
        "prompt": config.data.prompt,
        "batch": config.loop.batch,
        **run.task.measure(config, run.model, run.params, None, "test"),
        "flops_per_step": training_flops(config, run.model),
        "curve": read_curve(config.loop.workdir, config.loop.batch * config.data.pairs),
        "learning_rate": config.optimizer.learning_rate,
        **run_facts(run),
    }


def label(result: Result) -> str:
    """A run's mechanism and number of heads."""
    heads = result["num_heads"]
    return f"{result['model']}, {heads} head{'s' if heads > 1 else ''}"


def grouped(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The runs, grouped by all but their seed and ordered by width within a mechanism. A label names the settings in
    which groups of one width and batch differ."""

    def place(result: Result) -> str:
        return f"{label(result)}, width {result['d_model']}, batch {result['batch']}"

    groups = [
        (label(runs[0]) + name.removeprefix(place(runs[0])), runs)
        for name, runs in alike(results, place).items()
    ]
    return sorted(
        groups, key=lambda each: (label(first := each[1][0]), first["d_model"], first["batch"], each[0])
    )


def _kinds(results: Sequence[Result]) -> dict[tuple[int, int], Result]:
    """A run for each number of inputs and of pairs."""
    return dict(sorted({(run["input_dim"], len(run["errors"])): run for run in results}.items()))


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed, and for each reference method."""
    table = Table(
        "mechanism", "width", "head", "batch", "parameters", "TFLOP", "seconds", "seeds", "error",
        "error of the last",
    )  # fmt: skip
    for name, runs in grouped(results):
        first = runs[0]
        flops = [run["flops_per_step"] * run["curve"]["step"][-1] / 1e12 for run in runs]
        seconds = [run["curve"]["seconds"][-1] for run in runs]
        table.add(
            name, first["d_model"], first["d_model"] // first["num_heads"], first["batch"], first["parameters"],
            f"{np.mean(flops):.1f}", f"{np.mean(seconds):.0f}", seeds(runs),
            mean_range([run["error"] for run in runs]), mean_range([run["errors"][-1] for run in runs]),
        )  # fmt: skip
    for (dims, pairs), run in _kinds(results).items():
        errors = one_step_errors(dims, pairs)
        for name, mean, last in (
            ("least squares", run["least_squares_error"], run["least_squares"][-1]),
            (_GRADIENT, errors.mean(), errors[-1]),
        ):
            table.add(f"{name}, {dims} inputs, {pairs} pairs", *[None] * 7, f"{mean:.3f}", f"{last:.3f}")
    return str(table)


def draw(results: Sequence[Result]) -> Figure:
    """Four panels: the error by pairs seen, by width, and while training by operations and by seconds. Curves are named
    at their ends."""
    groups = grouped(results)
    figure, axs = panels(2, 2, (15, 9))
    (by_pairs, by_width), (by_flops, by_time) = axs
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
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {axes: [] for axes in axs.ravel()}
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
        named = by_mechanism.setdefault(name_of(title, runs[0], False), [])
        named.extend((*point, colour) for point in points)
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
    for axes in axs.ravel():
        axes.set_ylim(bottom=0)
        label_points(axes, ends[axes], gap=0.055, fontsize=9)
    return figure


def _draw_references(
    results: Sequence[Result],
    by_pairs: Axes,
    others: Sequence[Axes],
    ends: dict[Axes, list[tuple[str, float, float, str]]],
) -> None:
    """Draws the two reference methods in grey, as curves by pairs and levels elsewhere, and adds their ends to
    `ends`."""
    floors = {len(run["errors"]): (run["least_squares"], run["least_squares_error"]) for run in results}
    references = [("least squares", ":", curve, mean) for curve, mean in floors.values()]
    references += [
        (_GRADIENT, "--", errors, errors.mean())
        for errors in (one_step_errors(*kind) for kind in _kinds(results))
    ]
    for name, dashes, curve, mean in references:
        by_pairs.plot(curve, color=_GREY, linestyle=dashes)
        ends[by_pairs].append((name, len(curve) - 1, curve[-1], _GREY))
        for axes in others:
            axes.axhline(mean, color=_GREY, linestyle=dashes)
            # A level ends at the edge of the panel; the curves have set its limits.
            ends[axes].append((name, axes.get_xlim()[1], mean, _GREY))


main = Evaluation(
    [REGRESSION], TableOptions(), "eval.regression", "Measures runs of in-context regression.", measure,
    markdown, draw, kept="regression_test.json",
).main  # fmt: skip
