"""Trains a decoder on in-context linear regression: python -m train.regression [PRESET] [OPTIONS].

Every prompt is a new linear function and a few pairs (x, y) of it; the model predicts each y from the pairs before it
(Garg et al. 2022, as 002 section 4 uses it). full-8, full-1, btt-8 and mlr-8 are full attention with 8 heads and
with 1, bilinear BTT and bilinear MLR attention with 8, for two CPU cores. The run's folder holds config.json,
metrics.jsonl and checkpoints/; the same command again goes on where the run stopped, bit for bit.
`python -m eval.regression --workdir DIR` measures it beside least squares.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from brl_jax.models import Regressor
from train.config import parse, to_json
from train.data.in_context import HeldOutTasks, Prompt, TaskStream
from train.errors import UserError, command
from train.hosts import join
from train.loop import train
from train.mesh import held_rows, open_mesh
from train.metrics import say
from train.mup import make_rates
from train.regression_config import PRESETS, RegressionConfig
from train.step import Batch, Objective


def make_prompt(x: Float[Array, "B P D"], y: Float[Array, "B P"], kind: Prompt) -> Float[Array, "B T E"]:
    """(x_1, 0), (0, y_1), (x_2, 0), (0, y_2), ...: T = 2 P tokens of D + 1 numbers; "joined" has (x_i, y_i) for
    (0, y_i)."""
    batch, pairs, _ = x.shape
    questions = jnp.pad(x, ((0, 0), (0, 0), (0, 1)))
    answers = jnp.concatenate([x if kind == "joined" else jnp.zeros_like(x), y[..., None]], axis=-1)
    return jnp.stack([questions, answers], axis=2).reshape(batch, 2 * pairs, -1)


def squared_errors(
    model: Regressor, kind: Prompt, params: Any, batch: Batch, key: Array | None
) -> Float[Array, "B P"]:
    """Of each y, predicted where its x stands alone. `batch`: {"x": (B, P, D), "y": (B, P)} floats."""
    predicted: Any = model.apply(
        {"params": params},
        make_prompt(batch["x"], batch["y"], kind),
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
    )
    return jnp.square(predicted[:, ::2, 0] - batch["y"])


def regression_objective(model: Regressor, kind: Prompt) -> Objective:
    """The mean squared error over {"x": (B, P, D), "y": (B, P), "weights": (B, P)} floats."""

    def init(key: Array) -> Any:
        return model.init(key, jnp.zeros((1, 2, model.config.num_inputs), jnp.float32))["params"]

    def loss(params: Any, memory: Any, batch: Batch, key: Array | None):
        weights = batch["weights"]
        errors = squared_errors(model, kind, params, batch, key)
        return jnp.sum(errors * weights), jnp.sum(weights), memory

    return Objective(init, loss, lambda rows: None, rates=make_rates(model.config))


def batch_shapes(config: RegressionConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch of so many rows, without "reset"."""
    shape = (rows, config.data.pairs)
    y = jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"y": y, "weights": y, "x": jax.ShapeDtypeStruct((*shape, config.data.input_dim), jnp.float32)}


def build_model(config: RegressionConfig) -> Regressor:
    """The model of a configuration, tried on a batch's shapes.

    Raises:
      UserError: its parts don't fit each other or the batch.
    """
    rows = config.loop.batch // config.loop.accumulation
    try:
        model = Regressor(config.model)
        objective = regression_objective(model, config.data.prompt)
        jax.eval_shape(
            lambda key, batch: objective.sums(objective.init(key), None, batch, key),
            jax.random.key(0),
            batch_shapes(config, rows),
        )
    except ValueError as error:
        raise UserError(f"the model's options do not fit: {error}") from error
    return model


def held_out_tasks(config: RegressionConfig, split: str, mesh: Mesh | None = None) -> HeldOutTasks:
    """One pass over held-out prompts in batches of a microbatch's rows; on a mesh, those of this process."""
    rows = config.loop.batch // config.loop.accumulation
    held = None if mesh is None else held_rows(mesh, rows)
    return HeldOutTasks(config.data, batch=rows, split=split, rows=held)


def main(argv: Sequence[str]) -> None:
    """Trains; see the module's text and --help."""
    config = parse(
        PRESETS,
        "btt-8",
        argv,
        prog="python -m train.regression",
        about="Trains a decoder on in-context linear regression.",
    )
    model_config = dataclasses.replace(
        config.model, num_inputs=config.data.input_dim + 1, max_length=2 * config.data.pairs
    )
    config = dataclasses.replace(config, model=model_config)
    join(config.hosts)
    mesh = open_mesh(config.mesh, config.loop, config.model)
    model = build_model(config)
    stream = TaskStream(
        config.data,
        batch=config.loop.batch,
        seed=config.loop.seed,
        rows=held_rows(mesh, config.loop.batch),
    )
    held_out = held_out_tasks(config, "valid", mesh)
    train(
        regression_objective(model, config.data.prompt),
        config.loop,
        config.optimizer,
        config=to_json(config),
        stream=stream,
        held_out=held_out,
        mesh=mesh,
    )
    say(f"done: {config.loop.workdir}; python -m eval.regression --workdir {config.loop.workdir} measures it")


if __name__ == "__main__":
    sys.exit(command(main, "train.regression"))
