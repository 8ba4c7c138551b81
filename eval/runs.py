"""Reads what training left in a run's folder, whatever the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from etils import epath

from train.checkpoint import Checkpoints
from train.config_file import differences
from train.errors import UserError
from train.metrics import log
from train.storage import check_client
from train.task import Task, read_config


class Run(NamedTuple):
    """A trained run: its task, its configuration (whose workdir is the folder it was read from), its model, the
    parameters of one of its checkpoints, and that checkpoint's step."""

    task: Task[Any, Any]
    config: Any
    model: Any
    params: Any
    step: int


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
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"--workdir: no checkpoint in {checkpoints.folder}; expected one that training wrote")
    match checkpoint:
        case "best":
            best = checkpoints.best_step()
            candidates = steps[::-1] if best is None else [best]
        case "last":
            candidates = steps[::-1]
        case _ if checkpoint.isdecimal() and int(checkpoint) in steps:
            candidates = [int(checkpoint)]
        case _:
            raise UserError(
                f"--checkpoint: expected best, last or one of {', '.join(map(str, steps))}, got {checkpoint}"
            )
    model = task.build(config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        nn.unbox(jax.eval_shape(task.objective(model, config).init, jax.random.key(0))),
    )
    for step in candidates:
        try:
            return Run(task, config, model, checkpoints.restore_params(like, step), step)
        except UserError as error:
            meta = checkpoints.meta(step)
            differing = meta and differences(meta["config"], task.to_json(config), task.free_fields())
            if differing:
                raise UserError(
                    f"--workdir: checkpoint {checkpoints.folder / str(step)} is of another configuration than "
                    f"config.json: {', '.join(differing)}"
                ) from error
            if step == candidates[-1]:
                raise
            log(f"{error}; trying the one before it")
    raise AssertionError("unreachable: there is at least one candidate")
