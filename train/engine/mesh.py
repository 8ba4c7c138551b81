"""How a run's state and batches are sharded over the mesh, and which rows each process reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from brl_jax.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec, row_shards
from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.optimizer import OptimizerConfig, optimizer_of
from train.engine.step import Objective, TrainState, init_state, make_train_step


def open_mesh(config: MeshConfig, loop: LoopConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run, by default of the devices of all processes."""
    try:
        mesh = make_mesh(config, devices)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    rows, shards = loop.microbatch, row_shards(mesh)
    if rows % shards:
        each = f" / --accumulation {loop.accumulation} = {rows} rows" if loop.accumulation > 1 else " rows"
        raise UserError(
            f"--batch: expected a multiple of {shards * loop.accumulation}, so that mesh.data {mesh.shape['data']} x "
            f"mesh.fsdp {mesh.shape['fsdp']} share the rows of a step evenly, got {loop.batch}{each}"
        )
    return mesh


class TrainingPrograms(NamedTuple):
    """The jitted programs of a run on a mesh.

    Attributes:
      fresh: makes the first state.
      step: (state, batch) -> (state, metrics), see `make_train_step`; the state that it is given is donated.
      steps: the same for several batches (`train.engine.batch.stacked`), a step for each; the metrics are stacked too.
      shardings: of the state's arrays.
    """

    fresh: Callable[[], TrainState]
    step: Any
    steps: Any
    shardings: Any


def training_programs(
    mesh: Mesh, objective: Objective, config: OptimizerConfig, loop: LoopConfig
) -> TrainingPrograms:
    """The programs of a run. Call or lower them under `jax.set_mesh(mesh)`.

    The optimiser's moments are sharded like their parameters, the memory by rows. The rest is replicated."""
    rows = loop.microbatch
    boxed = jax.eval_shape(objective.init, jax.random.key(0))
    trained, _ = objective.split(boxed)
    optimizer, schedule = optimizer_of(config, loop.steps, trained, objective.rates(trained))

    def fresh() -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(loop.seed))
        return init_state(
            objective,
            nn.unbox(objective.init(params_key)),
            optimizer,
            key=run_key,
            rows=rows,
            accumulation=loop.accumulation,
            log_gradient_std=loop.log_gradient_std,
        )

    whole = NamedSharding(mesh, PartitionSpec())

    def stacked(array: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, partition_spec((None, *names), array.shape, dict(mesh.shape)))

    state = jax.eval_shape(fresh)
    try:
        params = parameter_shardings(mesh, boxed)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    shardings = state.replace(
        step=whole,
        params=params,
        opt_state=optax.tree.map_params(
            optimizer,
            # What another optimiser moves is left out of this one's state.
            lambda moment, sharding: moment if isinstance(moment, optax.MaskedNode) else sharding,
            state.opt_state,
            objective.split(params)[0],
            transform_non_params=lambda _: whole,
            is_leaf=lambda moment: isinstance(moment, optax.MaskedNode),
        ),
        key=whole,
        memory=objective.memory_names(state.memory, rows, stacked),
        moments=jax.tree.map(lambda _: whole, state.moments),
    )
    step = make_train_step(objective, optimizer, schedule, loop.accumulation)
    return TrainingPrograms(
        jax.jit(fresh, out_shardings=shardings),
        jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)),
        jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0, out_shardings=(shardings, whole)),
        shardings,
    )


def host_rows(mesh: Mesh | None, rows: int) -> Int[np.ndarray, " own"]:
    """The indices of the batch's rows that this process's devices need, ascending; all of them if the rows are
    replicated, or without a mesh."""
    if mesh is None:
        return np.arange(rows)
    parts = rows_sharding(mesh, rows, 1).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in parts if part is not None]))


def place_batch(mesh: Mesh, batch: Batch, rows: int) -> Batch:
    """The arrays of a batch, or of several (`stacked`), sharded over the mesh by rows.

    Args:
      batch: the rows that `host_rows` names. rows: the number of rows over all processes.
    """
    reset = np.asarray(batch.reset)
    before = reset.ndim  # 1 if the batches are counted in front of the rows

    def place(value: Any) -> jax.Array:
        value = np.asarray(value)
        sharding = rows_sharding(mesh, rows, value.ndim, before)
        shape = (*reset.shape, rows, *value.shape[before + 1 :])
        return jax.make_array_from_process_local_data(sharding, value, shape)

    whole = NamedSharding(mesh, PartitionSpec())
    return Batch(
        {name: place(value) for name, value in batch.arrays.items()},
        jax.make_array_from_callback(reset.shape, whole, lambda index: reset[index]),
    )


def rows_sharding(mesh: Mesh, rows: int, dims: int, before: int = 0) -> NamedSharding:
    """The sharding of an array of a batch with this many rows and dimensions, `before` of them in front of the rows."""
    names = (*(None for _ in range(before)), "batch", *(None for _ in range(dims - before - 1)))
    shape = (1,) * before + (rows,) + (1,) * (dims - before - 1)
    return NamedSharding(mesh, partition_spec(names, shape, dict(mesh.shape)))
