"""Starting from the weights of another run's encoder: `--pretrained RUN` of train.glue and train.lra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from train.engine.checkpoint import Checkpoints
from train.engine.errors import UserError
from train.engine.metrics import log
from train.engine.storage import check_client
from train.tasks.task import Task, read_config


def pretrained_run(tasks: Sequence[Task[Any, Any]], folder: str) -> tuple[Task[Any, Any], Any]:
    """The task, one of these, and the configuration of the run in a folder."""
    check_client("--pretrained", folder)
    try:
        return read_config(tasks, epath.Path(folder) / "config.json")
    except UserError as error:
        raise UserError(str(error).replace("--workdir", "--pretrained", 1)) from error


def pretrained_weights(task: Task[Any, Any], config: Any, folder: str, checkpoint: str) -> Any:
    """The parameters (NumPy arrays) in a checkpoint of that run: best, last or a step."""
    checkpoints = Checkpoints(epath.Path(folder) / "checkpoints", log=log)
    init = task.objective(task.model(config), config).init
    step, params = checkpoints.read_params(init, checkpoint, option="--pretrained")
    log(f"weights of {folder}, step {step}")
    return jax.tree.map(np.asarray, params)


def replaced(params: Any, read: Any) -> Any:
    """The parameters that were read, on the devices of `params`."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), read, params)
