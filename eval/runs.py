"""Reads what training left in a run's folder, whatever the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
from etils import epath

from brl_jax.layers import mechanism_name
from brl_jax.models import StackConfig
from train.checkpoint import Checkpoints
from train.config import read_json
from train.errors import UserError
from train.metrics import say
from train.step import Objective

C = TypeVar("C")
M = TypeVar("M")


def open_run(
    kind: type[C],
    build_model: Callable[[C], M],
    make_objective: Callable[[M], Objective],
    workdir: str,
    checkpoint: str,
) -> tuple[C, M, Any, int]:
    """A run's configuration, its model, the parameters of one of its checkpoints, and that checkpoint's step.

    Args:
      kind, build_model, make_objective: the task's.
      workdir: the run's folder; checkpoint: "best" (the last where none was measured), "last" or a step.

    Raises:
      UserError: no run or no such checkpoint there, or it is damaged ("last" goes on to the one before it).
    """
    config = read_json(kind, epath.Path(workdir) / "config.json")
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints", say=say)
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
    model = build_model(config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        nn.unbox(jax.eval_shape(make_objective(model).init, jax.random.key(0))),
    )
    for step in candidates:
        try:
            return config, model, checkpoints.restore_params(like, step), step
        except UserError as error:
            if step == candidates[-1]:
                raise
            say(f"{error}; trying the one before it")
    raise AssertionError("unreachable: there is at least one candidate")


def mechanism_names(config: StackConfig) -> str:
    """The names of a network's mechanisms, for people: "diag+norm"."""
    used = (config.mechanism, config.late_mechanism)
    return "+".join(dict.fromkeys(mechanism_name(mechanism) for mechanism in used if mechanism is not None))
