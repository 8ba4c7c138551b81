"""Measures in-context regression beside least squares: python -m eval.regression --workdir DIR.

The last line of stdout is one JSON object: the squared error by the number of pairs seen before (`errors` of the
model, and `least_squares`, both averaged over fresh functions), their means, the standard error, and what was
measured: parameters, the floating-point operations and seconds of training. It is kept as regression_test.json in the
run's folder.

python -m eval.regression --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured,
prints a table of them as markdown, and draws the error by pairs, against the width, and against the operations and
seconds of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from brl_jax.models import Regressor
from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.regression_table import draw, markdown
from train.cli.summary import mechanism_names
from train.engine.flops import matrix_flops
from train.engine.metrics import read_metrics
from train.tasks.regression import REGRESSION, RegressionConfig


@dataclasses.dataclass(frozen=True)
class RegressionEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""


def training_flops(config: RegressionConfig, model: Regressor) -> float:
    """Floating-point operations of the matrix products of one training step, without those of the input and output
    projections, which are the same for all mechanisms (arXiv:2509.07963, section 4)."""
    rows = config.loop.microbatch
    objective = REGRESSION.objective(model, config)
    batch = REGRESSION.batch_shapes(config, rows)
    params = nn.unbox(jax.eval_shape(objective.init, jax.random.key(0)))

    def loss(params: Any, batch: Any) -> Any:
        return objective.loss(params, None, batch, None)[0]

    total = matrix_flops(jax.jit(jax.grad(loss)).trace(params, batch).jaxpr, "cpu")
    tokens = rows * model.config.max_length
    # The forward pass and the weights' gradient; for the read-out the gradient of its inputs too.
    maps = 2 * model.config.num_inputs + 3 * model.config.num_outputs
    return (total - 2.0 * tokens * model.config.d_model * maps) * config.loop.accumulation


def read_curve(workdir: str, pairs: int) -> dict[str, list[float]]:
    """For each evaluation while training: the steps and the seconds so far, and the held-out error.

    Args:
      pairs: the pairs of a batch; with the rate in metrics.jsonl they give the seconds.

    Raises:
      UserError: the run's metrics are missing.
    """
    lines = read_metrics(workdir)
    rates = [line["tokens_per_second"] for line in lines]
    rates[:1] = rates[1:2] or rates[:1]  # the first step compiles the program
    seconds = np.cumsum([pairs / rate for rate in rates])
    measured = [i for i, line in enumerate(lines) if "val_loss" in line]
    return {
        "step": [lines[i]["step"] for i in measured],
        "seconds": [float(seconds[i]) for i in measured],
        "error": [lines[i]["val_loss"] for i in measured],
    }


class _RegressionEvaluation(Evaluation[RegressionEvalOptions]):
    kept = "regression_test.json"

    def measure(self, run: Run, options: RegressionEvalOptions) -> Measured:
        """The errors of a run on test prompts and what was measured."""
        config = run.config
        return Measured(
            {
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
        )


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _RegressionEvaluation(
        [REGRESSION],
        RegressionEvalOptions(),
        name="eval.regression",
        about="Measures runs of in-context regression.",
        markdown=markdown,
        draw=draw,
    ).main(argv)
