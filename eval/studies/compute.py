"""Language models at equal compute: python -m eval.compute --table DIR [--picture FILE.png].

The held-out loss of runs of train.lm against the floating-point operations of their training: the axis of figures 4b
and 14 of arXiv:2509.07963. --count formulas counts them pair by pair (`train.tasks.decoder_flops`), --count program in
the matrix products that the network's XLA implementation traces to, masked parts of blocks included. `whole` says
whether a loss covers all held-out text, as at the end of training, or only its beginning. If some runs of a table have
a loss of all held-out text, the others are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import by_network
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.output import Measured
from eval.harness.pictures import legend_outside, line_styles, panels
from eval.harness.runs import Run, operations_of_token, run_facts, unfinished
from eval.harness.table import Result, Table, mean_range, seeds
from train.engine.errors import UserError
from train.engine.metrics import log, read_metrics
from train.tasks.decoder_flops import decoder_multiplications, training_flops
from train.tasks.lm import LM


@dataclasses.dataclass(frozen=True)
class ComputeOptions(TableOptions):
    """What to measure."""

    count: Literal["formulas", "program"] = "formulas"
    """How operations are counted: by the formulas of some mechanisms, or in the program of any."""


def losses(workdir: str) -> list[tuple[int, float]]:
    """The steps and the held-out losses of a run's evaluations while training."""
    found = [(line["step"], line["val_loss"]) for line in read_metrics(workdir) if "val_loss" in line]
    if not found:
        raise UserError(f"--workdir: {workdir} has no evaluation")
    return found


def _by_formulas(run: Run) -> tuple[float, float]:
    """Operations of training on a token, and their share in scores and values."""
    try:
        parts = decoder_multiplications(run.config.model, run.config.loop.length)
    except ValueError as error:
        raise UserError(
            f"--workdir: {run.config.loop.workdir}: {error} by formulas; use --count program"
        ) from error
    length = run.config.loop.length
    return training_flops(run.config.model, length), (parts.scores + parts.values) / sum(parts)


def measure(run: Run, options: ComputeOptions) -> dict[str, Any]:
    """The operations of a run and its losses."""
    loop = run.config.loop
    if options.count == "program":
        a_token, share = operations_of_token(run), None
    else:
        a_token, share = _by_formulas(run)
    tokens = loop.batch * loop.length
    found = losses(loop.workdir)
    has_ended = unfinished(loop.workdir, run.config) is None
    curve = [
        {
            "step": step,
            "tokens": step * tokens,
            "tflop": step * tokens * a_token / 1e12,
            "loss": loss,
            "whole": loop.eval_tokens == 0 or (loop.full_eval and has_ended and step == found[-1][0]),
        }
        for step, loss in found
    ]
    return {
        "flops_per_token": a_token,
        "attention_share": share,
        **{name: curve[-1][name] for name in ("tflop", "loss", "whole")},
        "curve": curve,
        **run_facts(run),
    }


def select(measured: list[Measured]) -> list[Measured]:
    """The runs with a loss of all held-out text, if there are any; otherwise all runs."""
    whole = [each for each in measured if each.result["whole"]]
    for each in measured if whole else ():
        if not each.result["whole"]:
            log(
                f"eval.compute: {each.result['workdir']} is left out: its last loss is of the beginning of the "
                "held-out text, and the losses of others are of all of it"
            )
    return whole or measured


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed."""
    table = Table(
        "mechanism",
        "parameters",
        "MFLOP a token",
        "of them attention",
        "steps",
        "TFLOP",
        "seeds",
        "held-out loss",
    )
    for label, runs in by_network(results).items():
        first = runs[0]
        share = first["attention_share"]
        table.add(
            label,
            first["parameters"],
            f"{first['flops_per_token'] / 1e6:.3f}",
            None if share is None else f"{100 * share:.1f}%",
            _each(str(run["curve"][-1]["step"]) for run in runs),
            _each(f"{run['tflop']:.2f}" for run in runs),
            seeds(runs),
            mean_range([run["loss"] for run in runs]),
        )
    return str(table)


def _each(values: Iterable[str]) -> str:
    """The different values of a group's runs."""
    return ", ".join(dict.fromkeys(values))


def _curve(runs: Sequence[Result]) -> tuple[list[Mapping[str, Any]], list[float]]:
    """The evaluations that all runs of a group have, as the first run has them, and their losses averaged over runs.

    The last evaluation is left out if it reads other text: all of the held-out text, when the others read its
    beginning.
    """
    known = []
    for run in runs:
        points = run["curve"]
        known.append({point["step"]: point for point in points if point["whole"] == points[0]["whole"]})
    steps = sorted(set.intersection(*(set(points) for points in known)))
    means = [float(np.mean([points[step]["loss"] for points in known])) for step in steps]
    return [known[0][step] for step in steps], means


def draw(results: Sequence[Result]) -> Figure:
    """The loss over the tokens and over the operations of training, averaged over seeds, and each seed's last loss."""
    groups = by_network(results)
    figure, [[by_tokens, by_operations, ends]] = panels(1, 3, (17, 5), width_ratios=(3, 3, 2))
    styles = line_styles(list(groups))
    for label, runs in groups.items():
        points, y = _curve(runs)
        style = {**styles[label], "markersize": 5}
        for axes, name, unit in ((by_tokens, "tokens", 1e6), (by_operations, "tflop", 1.0)):
            axes.plot([point[name] / unit for point in points], y, label=label, **style)
        last = [run["loss"] for run in runs]
        ends.plot([run["tflop"] for run in runs], last, label=label, **{**style, "linestyle": "none"})
    # The first losses would hide the differences between the last ones.
    drawn = [point["loss"] for run in results for point in run["curve"]]
    limits = 0.99 * min(drawn), min(1.02 * max(drawn), 1.35 * min(drawn))
    ylabel = "held-out loss, nats a token"
    for axes, xlabel in ((by_tokens, "million tokens of training"), (by_operations, "TFLOP of training")):
        axes.set(xlabel=xlabel, ylabel=ylabel, title="while training, mean over the seeds", ylim=limits)
    ends.set(xlabel="TFLOP of training", ylabel=ylabel, title="the end, each seed")
    legend_outside(ends)
    return figure


main = Evaluation(
    [LM],
    ComputeOptions(),
    "eval.compute",
    "Language models at equal compute.",
    measure,
    markdown,
    draw,
    of_unfinished="its losses so far",
    select=select,
).main
