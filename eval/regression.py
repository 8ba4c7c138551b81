"""Measures in-context regression beside least squares: python -m eval.regression --workdir DIR.

The last line of stdout is one JSON object: the squared error by the number of pairs seen before (`errors`, of the
model, and `least_squares`, both averaged over fresh functions), their means, the standard error, and what was
measured: parameters, the floating-point operations and seconds of training. It is kept as regression_test.json in the
run's folder.

python -m eval.regression --table DIR [--picture FILE.png] measures the runs under DIR that have not been, prints a
table of them as markdown, and draws the error by pairs, against the width, and against the operations and seconds of
training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath

from brl_jax.models import Regressor
from eval.plotting import picture_path, save
from eval.program_costs import matrix_flops
from eval.regression_table import draw, markdown
from eval.runs import mechanism_names, open_run
from train.config import parse_options
from train.data.files import write_whole
from train.data.in_context import least_squares_errors
from train.errors import UserError, command
from train.regression import (
    batch_shapes,
    build_model,
    held_out_tasks,
    regression_objective,
    squared_errors,
)
from train.regression_config import RegressionConfig

_RESULT = "regression_test.json"


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    table: str | None = None
    """A folder of runs, at any depth; prints a table of them."""
    picture: str | None = None
    """A .png file for a picture of the table."""
    checkpoint: str = "best"
    """best (lowest error on held-out prompts), last, or a step."""


def training_flops(config: RegressionConfig, model: Regressor) -> float:
    """Floating-point operations of the matrix products of one training step, but for those of the input and output
    projections, which are the same for all mechanisms (002, section 4)."""
    rows = config.loop.batch // config.loop.accumulation
    objective = regression_objective(model, config.data.prompt)
    batch = batch_shapes(config, rows)
    params = nn.unbox(jax.eval_shape(objective.init, jax.random.key(0)))

    def loss(params: Any, batch: Any) -> Any:
        return objective.loss(params, None, batch, None)[0]

    total = matrix_flops(jax.jit(jax.grad(loss)).trace(params, batch).jaxpr, "cpu")
    tokens = rows * model.config.max_length
    # Forward and the weights' gradient, and of the read-out its inputs' as well.
    maps = 2 * model.config.num_inputs + 3 * model.config.num_outputs
    return (total - 2.0 * tokens * model.config.d_model * maps) * config.loop.accumulation


def read_curve(workdir: str, pairs: int) -> dict[str, list[float]]:
    """By evaluation while training: the steps and the seconds so far, and the held-out error.

    Args:
      pairs: those of a batch, whose rate metrics.jsonl tells.

    Raises:
      UserError: the run's metrics are missing or damaged.
    """
    path = epath.Path(workdir) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--workdir: {path} cannot be read: {error}") from error
    seconds = np.cumsum([pairs / line["tokens_per_second"] for line in lines])
    measured = [i for i, line in enumerate(lines) if "val_loss" in line]
    return {
        "step": [lines[i]["step"] for i in measured],
        "seconds": [float(seconds[i]) for i in measured],
        "error": [lines[i]["val_loss"] for i in measured],
    }


def measure(workdir: str, checkpoint: str) -> dict[str, Any]:
    """The errors of a run and what belongs to it.

    Raises:
      UserError: no run or checkpoint there.
    """
    # The objective says what the parameters' shapes are, which do not hang on the kind of prompt.
    config, model, params, step = open_run(
        RegressionConfig,
        build_model,
        lambda model: regression_objective(model, "alternate"),
        workdir,
        checkpoint,
    )
    kind = config.data.prompt
    look = jax.jit(lambda params, batch: squared_errors(model, kind, params, batch, None))
    errors, least = [], []
    for batch in held_out_tasks(config, "test"):
        there = batch["weights"][:, 0] > 0
        errors.append(np.asarray(look(params, {"x": batch["x"], "y": batch["y"]}))[there])
        least.append(least_squares_errors(batch["x"][there], batch["y"][there]))
    ours, best = np.concatenate(errors), np.concatenate(least)
    by_prompt = ours.mean(axis=1)
    return {
        "model": mechanism_names(config.model),
        "num_heads": config.model.num_heads,
        "d_model": config.model.d_model,
        "num_layers": config.model.num_layers,
        "input_dim": config.data.input_dim,
        "prompt": kind,
        "batch": config.loop.batch,
        "error": float(ours.mean()),
        "standard_error": float(by_prompt.std(ddof=1) / np.sqrt(len(by_prompt))) if len(ours) > 1 else None,
        "least_squares_error": float(best.mean()),
        "errors": ours.mean(axis=0).tolist(),
        "least_squares": best.mean(axis=0).tolist(),
        "prompts": len(ours),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "flops_per_step": training_flops(config, model),
        "curve": read_curve(workdir, config.loop.batch * config.data.pairs),
        "learning_rate": config.optimizer.learning_rate,
        "step": step,
        "seed": config.loop.seed,
        "workdir": workdir,
    }


def _measure_and_keep(workdir: str, checkpoint: str) -> dict[str, Any]:
    result = measure(workdir, checkpoint)
    if checkpoint == "best":
        write_whole(epath.Path(workdir) / _RESULT, json.dumps(result, indent=1) + "\n")
    return result


def _runs(folder: Path, checkpoint: str) -> list[dict[str, Any]]:
    """The results of all runs of in-context regression under a folder, measured where they have not been."""
    results = []
    for path in sorted(folder.rglob("config.json")):
        try:
            is_ours = "input_dim" in json.loads(path.read_text())["data"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_ours:
            kept = path.parent / _RESULT
            known = checkpoint == "best" and kept.exists()
            results.append(
                json.loads(kept.read_text()) if known else _measure_and_keep(str(path.parent), checkpoint)
            )
    if not results:
        raise UserError(f"--table: no run of train.regression under {folder}")
    return results


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    options = parse_options(
        EvalOptions(), argv, prog="python -m eval.regression", about="Measures runs of in-context regression."
    )
    if (options.workdir is None) == (options.table is None):
        raise UserError("--workdir, --table: expected one of the two")
    if options.picture is not None and options.table is None:
        raise UserError("--picture: expected with --table only")
    if options.workdir is not None:
        print(json.dumps(_measure_and_keep(options.workdir, options.checkpoint)))
        return
    picture = picture_path(options.picture)
    results = _runs(Path(options.table or "."), options.checkpoint)
    print(markdown(results))
    if picture is not None:
        save(draw(results), picture)


if __name__ == "__main__":
    sys.exit(command(main, "eval.regression"))
