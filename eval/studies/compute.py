"""Language models at equal compute: python -m eval.compute --table DIR [--picture FILE.png].

The held-out loss of runs of train.lm against the floating-point operations of their training: the axis of figures 4b
and 14 of arXiv:2509.07963. The presets `chars-NAME` train as many steps as take the same operations, and so do
`owt-chars-NAME`. The operations are counted in one of two ways:

    --count formulas  by `train.decoder_flops`, pair by pair: full, MLR, global-window and sliding-window attention
    --count program   the matrix products that the network's XLA implementation traces to, masked parts of blocks
                      included: any mechanism

--workdir DIR prints a JSON object of one run: `flops_per_token` of training, the `attention_share` that scores and
values have in it (by formulas), `tflop` of the whole run, `loss` at its end, and the `curve` of losses while training
(step, tokens, tflop, loss); `whole` says of each loss whether it is of all held-out text, as at the end of training, or
of its beginning. --table prints a row for each group of runs that differ in their seed only, and --picture draws them
over the tokens and over the operations of training. Runs that have no loss of all held-out text yet are left out where
others have one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.output import Measured
from eval.harness.pictures import legend_outside, line_styles
from eval.harness.runs import Run, run_facts, unfinished
from eval.tasks.recall_table import grouped
from train.config_file import flatten, to_json
from train.decoder_flops import decoder_multiplications, training_flops
from train.errors import UserError
from train.metrics import log, read_metrics
from train.tasks.lm import LM
from train.throughput import step_flops

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ComputeOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    count: Literal["formulas", "program"] = "formulas"
    """How operations are counted: by the formulas of some mechanisms, or in the program of any."""


def losses(workdir: str) -> list[tuple[int, float]]:
    """The steps and the held-out losses of a run's evaluations while training.

    Raises:
      UserError: the run's metrics are missing, or it was never evaluated.
    """
    found = [(line["step"], line["val_loss"]) for line in read_metrics(workdir) if "val_loss" in line]
    if not found:
        raise UserError(f"--workdir: {workdir} has no evaluation")
    return found


def _by_formulas(run: Run) -> tuple[float, float]:
    """Operations of training on a token, and the share of scores and values in them.

    Raises:
      UserError: there is no formula for a mechanism of the network.
    """
    try:
        parts = decoder_multiplications(run.config.model, run.config.loop.length)
    except ValueError as error:
        raise UserError(
            f"--workdir: {run.config.loop.workdir}: {error} by formulas; use --count program"
        ) from error
    length = run.config.loop.length
    return training_flops(run.config.model, length), (parts.scores + parts.values) / sum(parts)


def _of_program(run: Run) -> tuple[float, None]:
    """Operations of training on a token, as `train.throughput.step_flops` counts them."""
    loop = run.config.loop
    objective = run.task.objective(run.model, run.config)
    batch = run.task.batch_shapes(run.config, loop.batch)
    return step_flops(objective, run.params, batch) / (loop.batch * loop.length), None


class _ComputeEvaluation(Evaluation[ComputeOptions]):
    of_unfinished = "its losses so far"

    def _measure_all(self, folder: str, options: ComputeOptions) -> list[Measured]:
        measured = super()._measure_all(folder, options)
        whole = [each for each in measured if each.result["whole"]]
        for each in measured:
            if whole and not each.result["whole"]:
                log(
                    f"{self.name}: {each.result['workdir']} is left out: its last loss is of the beginning of the "
                    "held-out text, and those of others are of all of it"
                )
        return whole or measured

    def measure(self, run: Run, options: ComputeOptions) -> Measured:
        """The operations of a run and its losses."""
        config = run.config
        a_token, share = _of_program(run) if options.count == "program" else _by_formulas(run)
        tokens = config.loop.batch * config.loop.length
        settings = {part: to_json(getattr(config, part)) for part in ("data", "model", "optimizer")}
        settings["loop"] = {name: getattr(config.loop, name) for name in ("batch", "length", "steps")}
        found = losses(config.loop.workdir)
        has_ended = unfinished(config.loop.workdir, config) is None
        curve = [
            {
                "step": step,
                "tokens": step * tokens,
                "tflop": step * tokens * a_token / 1e12,
                "loss": loss,
                "whole": config.loop.eval_tokens == 0
                or (config.loop.full_eval and has_ended and step == found[-1][0]),
            }
            for step, loss in found
        ]
        return Measured(
            {
                "settings": flatten(settings),
                "flops_per_token": a_token,
                "attention_share": share,
                "tflop": curve[-1]["tflop"],
                "loss": curve[-1]["loss"],
                "whole": curve[-1]["whole"],
                "curve": curve,
                **run_facts(run),
            }
        )


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ in their seed only."""
    lines = [
        "| mechanism | parameters | MFLOP a token | of them attention | steps | TFLOP | seeds | held-out loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, runs in grouped(results).items():
        first = runs[0]
        last = [run["loss"] for run in runs]
        steps = _each(str(run["curve"][-1]["step"]) for run in runs)
        tflop = _each(f"{run['tflop']:.2f}" for run in runs)
        share = "-" if first["attention_share"] is None else f"{100 * first['attention_share']:.1f}%"
        spread = "" if len(runs) == 1 else f" ({min(last):.3f} to {max(last):.3f})"
        lines.append(
            f"| {label} | {first['parameters']} | {first['flops_per_token'] / 1e6:.3f} "
            f"| {share} | {steps} | {tflop} "
            f"| {', '.join(str(run['seed']) for run in runs)} | {np.mean(last):.3f}{spread} |"
        )
    return "\n".join(lines)


def _each(values: Iterable[str]) -> str:
    """The values of a group's runs, once where all are alike."""
    return ", ".join(dict.fromkeys(values))


def _curve(runs: Sequence[Result]) -> tuple[list[Mapping[str, Any]], list[float]]:
    """The evaluations that all runs of a group have, as the first run has them, and their losses averaged over the
    runs.

    The evaluation at the end of training is left out where it is of other text: it reads all held-out text, and the
    others the beginning. Where there is no other it stays.
    """
    known = []
    for run in runs:
        points = run["curve"]
        known.append({point["step"]: point for point in points if point["whole"] == points[0]["whole"]})
    steps = sorted(set.intersection(*(set(points) for points in known)))
    means = [float(np.mean([points[step]["loss"] for points in known])) for step in steps]
    return [known[0][step] for step in steps], means


def draw(results: Sequence[Result]) -> Figure:
    """The loss over the tokens and over the operations of training, averaged over seeds, and the last loss of each
    seed."""
    groups = grouped(results)
    figure = Figure(figsize=(17, 5), layout="constrained")
    by_tokens, by_operations, ends = figure.subplots(1, 3, width_ratios=(3, 3, 2))
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
    for axes, xlabel in ((by_tokens, "million tokens of training"), (by_operations, "TFLOP of training")):
        axes.set(
            xlabel=xlabel, ylabel="held-out loss, nats a token", title="while training, mean over the seeds",
            ylim=limits,
        )  # fmt: skip
    ends.set(xlabel="TFLOP of training", ylabel="held-out loss, nats a token", title="the end, each seed")
    for axes in (by_tokens, by_operations, ends):
        axes.grid(True, alpha=0.3)
    legend_outside(ends)
    return figure


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _ComputeEvaluation(
        [LM],
        ComputeOptions(),
        name="eval.compute",
        about="Language models at equal compute.",
        markdown=markdown,
        draw=draw,
    ).main(argv)
