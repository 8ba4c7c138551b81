"""Reads what training left in a run's folder, whatever the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from train.cli.summary import num_parameters
from train.engine.checkpoint import Checkpoints
from train.engine.errors import UserError
from train.engine.metrics import log
from train.engine.storage import check_client
from train.tasks.task import Task, read_config


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


def run_names(workdirs: Sequence[str]) -> dict[str, str]:
    """The names of runs in tables and pictures, by their folders: as many of the last parts of each path as it takes
    for all to differ."""
    parts = {workdir: Path(workdir).resolve().parts for workdir in workdirs}
    depth = 1
    while len({path[-depth:] for path in parts.values()}) < len(set(parts.values())):
        depth += 1
    return {workdir: "/".join(path[-depth:]) for workdir, path in parts.items()}


def run_labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The mechanism and the name of the run of each result, which has "mechanism" and "workdir"."""
    names = run_names([result["workdir"] for result in results])
    return [f"{result['mechanism']} ({names[result['workdir']]})" for result in results]


def first_rows(run: Run, split: str, sequences: int) -> dict[str, np.ndarray]:
    """The first `sequences` rows of a split that have a weight and the largest shape that the task's rows have (the
    longest of them; of recall, those with the most records), as a batch of the objective. Where no row of the split is
    as large, those of its largest shape."""
    data = run.task.load(run.config, (split,))
    shapes = {name: array.shape[1:] for name, array in run.task.batch_shapes(run.config, 1).items()}
    largest = tuple(shapes.values())
    found: dict[tuple[tuple[int, ...], ...], list[dict[str, np.ndarray]]] = {}
    for batch in run.task.held_out(run.config, data, split):
        arrays = {name: np.asarray(batch[name]) for name in shapes}
        weights = np.asarray(batch["weights"])
        weights = weights.reshape(len(weights), -1).max(axis=1)
        rows = found.setdefault(tuple(array.shape[1:] for array in arrays.values()), [])
        if len(rows) < sequences:
            rows.extend(
                {name: array[i] for name, array in arrays.items()} for i in np.flatnonzero(weights > 0)
            )
        if len(found.get(largest, ())) >= sequences:
            break
    chosen = found.get(largest) or found[max(found, key=lambda shape: (len(found[shape]) > 0, shape))]
    return {name: np.stack([row[name] for row in chosen[:sequences]]) for name in shapes}
