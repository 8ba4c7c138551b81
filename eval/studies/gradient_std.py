"""How much the gradients of runs varied: python -m eval.gradient_std --workdir DIR [DIR ...].

Reads the relative standard deviation of the gradients' norms (TransNormer, arXiv:2210.10340, table 2) that training
with `--log_gradient_std` wrote. In a short run the first steps decide this number, because their gradients are
several times as large as all later ones: --after N counts the steps after N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from brl_jax.fields import Natural
from eval.harness.options import PictureOptions
from eval.harness.output import study
from eval.harness.pictures import legend_outside, line_styles, panels
from eval.harness.runs import run_labels
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.engine.metrics import read_metrics
from train.tasks.lm import LM
from train.tasks.mlm import MLM
from train.tasks.task import read_config

_TITLES = {
    "grad_rsd": "norm of the whole gradient",
    "grad_rsd_tensors": "norms of the tensors' gradients, averaged",
}


@dataclasses.dataclass(frozen=True)
class GradientStdOptions(PictureOptions):
    """Which runs to compare."""

    after: Natural = 0
    """Also give the relative standard deviation over the steps after this one; 0: only over all steps."""


def read_curves(workdir: str) -> dict[str, list[float]]:
    """The steps of a run and the values logged at each."""
    lines = [line for line in read_metrics(workdir) if "grad_rsd" in line]
    if not lines:
        raise UserError(f"--workdir: {workdir} was trained without --log_gradient_std")
    return {name: [line[name] for line in lines] for name in ("step", "grad_norm", *_TITLES)}


def last_values(workdir: str, after: int = 0) -> dict[str, Any]:
    """The JSON object of one run: the values at its last step and, with `after`, over the later steps."""
    _, config = read_config([LM, MLM], epath.Path(workdir) / "config.json")
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
    figure, [axs] = panels(1, len(_TITLES), (13, 5))
    styles = line_styles([result["workdir"] for result in results])
    labels = run_labels(results)
    for axes, (name, title) in zip(axs, _TITLES.items()):
        for label, result, curve in zip(labels, results, curves, strict=True):
            style = {**styles[result["workdir"]], "markersize": 5}
            every = max(1, len(curve["step"]) // 10)
            axes.plot(curve["step"], curve[name], label=label, markevery=every, **style)
        axes.set(xlabel="step", ylabel="std / mean over the steps so far", title=title)
        axes.set_ylim(bottom=0)
    legend_outside(axs[-1])
    return figure


main = study(
    GradientStdOptions(),
    "eval.gradient_std",
    "How much the gradients of runs varied.",
    lambda options: (last_values(folder, options.after) for folder in options.workdir),
    draw,
)
