"""Opens the runs of any task, and names them in tables and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from brl_jax.json_files import check_regular
from train.cli.summary import num_parameters
from train.engine.checkpoint import Checkpoints
from train.engine.errors import UserError, reason
from train.engine.metrics import log
from train.engine.storage import check_client, is_remote
from train.engine.throughput import step_flops
from train.tasks.task import Task, read_config


class Run(NamedTuple):
    """A trained run at one of its checkpoints. Its configuration's workdir is the folder that it was read from."""

    task: Task[Any, Any]
    config: Any
    model: Any
    params: Any
    step: int


def run_facts(run: Run) -> dict[str, Any]:
    """What every evaluation reports about a run in addition to its measures, ready for JSON."""
    return {
        "parameters": num_parameters(run.params),
        "step": run.step,
        "seed": run.config.loop.seed,
        "workdir": run.config.loop.workdir,
    }


def open_run(tasks: Sequence[Task[Any, Any]], workdir: str, checkpoint: str) -> Run:
    """Opens a run.

    Args:
      tasks: the run must be of one of these.
      workdir: the run's folder. checkpoint: "best" (the last if none was evaluated), "last" or a step.

    Raises:
      UserError: the run or the checkpoint does not exist or is damaged. "last" falls back to the newest readable one.
    """
    check_client("--workdir", workdir)
    path = epath.Path(workdir) / "config.json"
    try:
        if not is_remote(path):
            regular_file("--workdir", str(path))
        task, config = read_config(tasks, path)
    except OSError as error:
        raise UserError(f"--workdir: cannot read {path}: {reason(error)}") from error
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, workdir=workdir))
    cache = getattr(config.data, "cache_dir", None)
    if cache is not None and not is_remote(cache) and not Path(cache).expanduser().is_dir():
        # Whoever wrote config.json does not decide which folders this machine gets.
        log(f"--workdir: {path} names the cache {cache}, which is not on this machine; another is used")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=None))
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


def operations_of_token(run: Run) -> float:
    """The floating-point operations of training on a token, in the matrix products of the network's XLA implementation,
    masked parts of blocks included."""
    loop = run.config.loop
    batch = run.task.batch_shapes(run.config, loop.batch)
    of_step = step_flops(run.task.objective(run.model, run.config), run.params, batch)
    return of_step / batch["tokens"].size


def unfinished(workdir: str | Path, config: Any) -> int | None:
    """The step of the last checkpoint of a run with steps left to train; None for a run that has ended, also by its
    `patience`, or has no checkpoint."""
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints")
    steps = checkpoints.steps()
    if not steps or steps[-1] >= config.loop.steps:
        return None
    best = (checkpoints.meta(steps[-1]) or {}).get("best", {})
    return None if 0 < config.loop.patience <= best.get("misses", 0) else steps[-1]


def run_names(workdirs: Sequence[str]) -> dict[str, str]:
    """A short name for each folder: the last parts of its path, so many that all names differ."""
    parts = {workdir: Path(workdir).resolve().parts for workdir in workdirs}
    depth = 1
    while len({path[-depth:] for path in parts.values()}) < len(set(parts.values())):
        depth += 1
    return {workdir: "/".join(path[-depth:]) for workdir, path in parts.items()}


def run_labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each result, made of its "mechanism" and the name of its "workdir"."""
    names = run_names([result["workdir"] for result in results])
    return [f"{result['mechanism']} ({names[result['workdir']]})" for result in results]


def regular_file(option: str, name: str) -> Path:
    """The path of a file to read. Raises UserError for a folder, a pipe or a device, which could wait for ever."""
    try:
        check_regular(name)
    except ValueError as error:
        raise UserError(f"{option}: expected a regular file, got {name}") from error
    return Path(name)


def first_rows(run: Run, split: str, sequences: int) -> dict[str, np.ndarray]:
    """The first `sequences` rows of a split that have a weight, as a batch of the objective.

    All have one shape, the largest: the longest rows, or in recall the rows with the most records.
    """
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
