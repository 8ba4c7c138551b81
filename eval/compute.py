"""Language models at equal compute: python -m eval.compute --table DIR [--picture FILE.png].

The held-out loss of runs of train.lm against the floating-point operations of their training, which
`train.decoder_flops` counts by the formulas of full, MLR, global-window and sliding-window attention: the axis of
figures 4b and 14 of arXiv:2509.07963. The presets `chars-NAME` train as many steps as take the same operations, and so
do `owt-chars-NAME`.

--workdir DIR prints a JSON object of one run: `flops_per_token` of training, the `attention_share` that scores and
values have in it, `tflop` of the whole run, `loss` at its end, and the `curve` of losses while training (step, tflop,
loss), whose last point is of all held-out text if `whole` is true, and the others of its beginning. --table prints a
row for each group of runs that differ in their seed only, and --picture draws them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from eval.main import Evaluation, Measured, TableOptions
from eval.plotting import legend_outside, line_styles
from eval.recall_table import grouped
from eval.runs import Run, run_facts
from train.config_file import flatten, to_json
from train.decoder_flops import decoder_multiplications, training_flops
from train.errors import UserError, command
from train.tasks.lm import LM

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ComputeOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""


def losses(workdir: str) -> list[tuple[int, float]]:
    """The steps and the held-out losses of a run's evaluations while training.

    Raises:
      UserError: the run's metrics are missing or damaged, or it was never evaluated.
    """
    path = epath.Path(workdir) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--workdir: {path} cannot be read: {error}") from error
    found = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    if not found:
        raise UserError(f"--workdir: {workdir} has no evaluation")
    return found


class _ComputeEvaluation(Evaluation[ComputeOptions]):
    def measure(self, run: Run, options: ComputeOptions) -> Measured:
        """The operations of a run and its losses."""
        config = run.config
        length = config.loop.length
        try:
            parts = decoder_multiplications(config.model, length)
        except ValueError as error:
            raise UserError(f"--workdir: {config.loop.workdir}: {error}") from error
        a_step = training_flops(config.model, length) * config.loop.batch * length
        settings = {part: to_json(getattr(config, part)) for part in ("data", "model", "optimizer")}
        settings["loop"] = {name: getattr(config.loop, name) for name in ("batch", "length", "steps")}
        curve = [
            {"step": step, "tflop": step * a_step / 1e12, "loss": loss}
            for step, loss in losses(config.loop.workdir)
        ]
        return Measured(
            {
                "settings": flatten(settings),
                "flops_per_token": training_flops(config.model, length),
                "attention_share": (parts.scores + parts.values) / sum(parts),
                "tflop": curve[-1]["tflop"],
                "loss": curve[-1]["loss"],
                "whole": config.loop.full_eval,
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
        spread = "" if len(runs) == 1 else f" ({min(last):.3f} to {max(last):.3f})"
        lines.append(
            f"| {label} | {first['parameters']} | {first['flops_per_token'] / 1e6:.3f} "
            f"| {100 * first['attention_share']:.1f}% | {first['curve'][-1]['step']} | {first['tflop']:.2f} "
            f"| {', '.join(str(run['seed']) for run in runs)} | {np.mean(last):.3f}{spread} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Figure:
    """The loss over the operations of training, averaged over seeds, and the last loss of each seed."""
    groups = grouped(results)
    figure = Figure(figsize=(13, 5), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=(3, 2))
    styles = line_styles(list(groups))
    for label, runs in groups.items():
        # The evaluation at the end reads all held-out text, the others its beginning.
        points = len(runs[0]["curve"]) - runs[0]["whole"]
        x = [point["tflop"] for point in runs[0]["curve"][:points]]
        y = np.mean([[point["loss"] for point in run["curve"][:points]] for run in runs], axis=0)
        style = {**styles[label], "markersize": 5}
        curves.plot(x, y, label=label, **style)
        last = [run["loss"] for run in runs]
        ends.plot([runs[0]["tflop"]] * len(last), last, label=label, **{**style, "linestyle": "none"})
    # The first losses would hide the differences between the last ones.
    lowest = min(run["loss"] for run in results)
    curves.set(
        xlabel="TFLOP of training", ylabel="held-out loss, nats a token", title="while training, mean over the seeds",
        ylim=(0.99 * lowest, 1.35 * lowest),
    )  # fmt: skip
    ends.set(xlabel="TFLOP of training", title="the end, each seed")
    for axes in (curves, ends):
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


if __name__ == "__main__":
    sys.exit(command(main, "eval.compute"))
