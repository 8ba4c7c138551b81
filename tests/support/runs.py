"""The folder of a run before its first step, without compiling one."""

from typing import Any

import jax
import optax
from etils import epath

from tests.support.parameters import drawn
from train.engine.checkpoint import Checkpoints
from train.engine.config_file import write_json
from train.engine.step import init_state
from train.tasks.task import Task


def untrained(task: Task[Any, Any], config: Any, params: Any = None) -> None:
    """Writes the run's configuration, and a checkpoint with the parameters, which are drawn if not given."""
    objective = task.objective(task.model(config), config)
    params = drawn(objective.init) if params is None else params
    state = init_state(objective, params, optax.identity(), key=jax.random.key(1), rows=1, accumulation=1)
    folder = epath.Path(config.loop.workdir)
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, state, {"config": task.to_json(config)})
    checkpoints.wait()
    checkpoints.close()
    write_json(task.to_json(config), folder / "config.json")
