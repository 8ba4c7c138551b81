"""Reads what training left in a run's folder, whatever the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from train.checkpoint import Checkpoints
from train.errors import UserError
from train.metrics import log
from train.storage import check_client
from train.summary import num_parameters
from train.task import Task, read_config


class Run(NamedTuple):
    """A trained run: its task, its configuration (whose workdir is the folder it was read from), its model, the
    parameters of one of its checkpoints, and that checkpoint's step."""

    task: Task[Any, Any]
    config: Any
    model: Any
    params: Any
    step: int


def run_facts(run: Run) -> dict[str, Any]:
    """What every evaluation says of a run besides its measures, ready for JSON."""
    return {
        "parameters": num_parameters(run.params),
        "step": run.step,
        "seed": run.config.loop.seed,
        "workdir": run.config.loop.workdir,
    }


def open_run(tasks: Sequence[Task[Any, Any]], workdir: str, checkpoint: str) -> Run:
    """Opens a run.

    Args:
      tasks: those that the run may be of.
      workdir: the run's folder. checkpoint: "best" (the last where none was measured), "last" or a step.

    Raises:
      UserError: there is no run or no such checkpoint, or it is damaged ("last" then takes the one before it).
    """
    check_client("--workdir", workdir)
    task, config = read_config(tasks, epath.Path(workdir) / "config.json")
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, workdir=workdir))
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints", log=log)
    model = task.build(config)

    def explain(step: int) -> None:
        meta = checkpoints.meta(step)
        differing = meta and task.differences(meta["config"], config)
        if differing:
            raise UserError(
                f"--workdir: checkpoint {checkpoints.folder / str(step)} is of another configuration than "
                f"config.json: {', '.join(differing)}"
            )

    step, params = checkpoints.read_params(task.objective(model, config).init, checkpoint, explain=explain)
    return Run(task, config, model, params, step)


def first_rows(run: Run, split: str, sequences: int) -> dict[str, np.ndarray]:
    """The first `sequences` rows of a split that have a weight and are of one length, as a batch of the objective."""
    data = run.task.load(run.config, (split,))
    found: list[dict[str, np.ndarray]] = []
    shape: Any = None
    for batch in run.task.held_out(run.config, data, split):
        arrays = {name: np.asarray(batch[name]) for name in run.task.batch_shapes(run.config, 1)}
        shapes = {name: array.shape[1:] for name, array in arrays.items()}
        shape = shapes if shape is None else shape
        weights = np.asarray(batch["weights"])
        weights = weights.reshape(len(weights), -1).max(axis=1)
        if shapes == shape:
            found.extend({n: a[i] for n, a in arrays.items()} for i in np.flatnonzero(weights > 0))
        if len(found) >= sequences:
            break
    chosen = found[:sequences]
    return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}
