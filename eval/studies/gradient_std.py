"""How much the gradients of runs varied: python -m eval.gradient_std --workdir DIR [DIR ...].

Reads what `train.lm --log_gradient_std True` wrote to metrics.jsonl: the relative standard deviation of the
gradients' norms over all steps so far (TransNormer, arXiv:2210.10340, table 2; defined in train/moments.py). Prints a
JSON object a run, with the values at its last step, and draws how they developed. In a short run the first steps, whose
gradients are several times as large as all later ones, decide that number: with --after N it also prints
`grad_rsd_after`, that of the whole gradient's norm over the steps after N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from brl_jax.attention.core.checks import check_at_least
from eval.harness.pictures import legend_outside, line_styles, report
from eval.harness.runs import run_labels
from train.cli.options import parse_options
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.engine.metrics import read_metrics
from train.tasks.lm import LM
from train.tasks.task import read_config

_TITLES = {
    "grad_rsd": "norm of the whole gradient",
    "grad_rsd_tensors": "norms of the tensors' gradients, averaged",
}


@dataclasses.dataclass(frozen=True)
class GradientStdOptions:
    """Which runs to compare."""

    workdir: tuple[str, ...] = ("runs/small",)
    """Folders of the runs; each becomes a curve."""
    after: int = 0
    """Also give the relative standard deviation over the steps after this one; 0: only that over all steps."""
    picture: str | None = None
    """File to draw the curves in (PNG)."""

    def __post_init__(self):
        if not self.workdir:
            raise ValueError("workdir must be one or more folders, got none")
        check_at_least(self, "after", least=0)


def read_curves(workdir: str) -> dict[str, list[float]]:
    """The steps of a run and the values logged at each.

    Raises:
      UserError: there is no run, or it did not log them.
    """
    lines = [line for line in read_metrics(workdir) if "grad_rsd" in line]
    if not lines:
        raise UserError(f"--workdir: {workdir} was trained without --log_gradient_std True")
    return {name: [line[name] for line in lines] for name in ("step", "grad_norm", *_TITLES)}


def last_values(workdir: str, after: int = 0) -> dict[str, Any]:
    """The JSON object of one run: the values at its last step, and with `after` that over the steps after it.

    Raises:
      UserError: there is no run, it did not log them, or it has no step after `after`.
    """
    _, config = read_config([LM], epath.Path(workdir) / "config.json")
    curves = read_curves(workdir)
    last = {name: curves[name][-1] for name in ("step", *_TITLES)}
    if after:
        norms = np.array([norm for step, norm in zip(curves["step"], curves["grad_norm"]) if step > after])
        if not norms.size:
            raise UserError(f"--after: {workdir} ends at step {last['step']}, got {after}")
        last["grad_rsd_after"] = float(norms.std() / norms.mean())
    return {"workdir": workdir, "mechanism": mechanism_names(config.model), **last}


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """The relative standard deviation up to each step, one curve for each run."""
    curves = [read_curves(result["workdir"]) for result in results]
    figure = Figure(figsize=(13, 5), layout="constrained")
    styles = line_styles([result["workdir"] for result in results])
    labels = run_labels(results)
    panels = figure.subplots(1, len(_TITLES))
    for axes, (name, title) in zip(panels, _TITLES.items()):
        for label, result, curve in zip(labels, results, curves, strict=True):
            axes.plot(
                curve["step"],
                curve[name],
                label=label,
                markevery=max(1, len(curve["step"]) // 10),
                markersize=5,
                **styles[result["workdir"]],
            )
        axes.set(xlabel="step", ylabel="std / mean over the steps so far", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    legend_outside(panels[-1])
    return figure


def main(argv: Sequence[str]) -> None:
    """Prints a JSON object for each run and draws the picture; see the module's docstring and --help."""
    options = parse_options(
        GradientStdOptions(),
        argv,
        prog="python -m eval.gradient_std",
        about="How much the gradients of runs varied.",
    )
    report((last_values(folder, options.after) for folder in options.workdir), draw, options.picture)
