"""Classifiers of the Long Range Arena: inference and a training step, in the setting of TransNormer's table 7.

Two layers with a classifier on the mean of their outputs, bidirectional, for every mechanism that has such a form, on
sequences of bytes without padding. The training step is the one of `train.lra`: forward and backward pass and the
optimiser. TransNormer is arXiv:2210.10340; its network has 2 heads of 32 features (--heads 2 --head_dim 32).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.speed.measure import Candidate, Case, Program, check_finite, check_room, compile_program
from eval.speed.networks import Network, network, network_names
from train.cli.summary import num_parameters
from train.engine.batch import Batch
from train.engine.mesh import open_mesh, place_batch, training_programs
from train.engine.step import make_eval_step
from train.tasks.lra import LRA
from train.tasks.lra_config import PRESETS, LraConfig
from train.tasks.task import Task

if TYPE_CHECKING:
    from eval.speed.options import SpeedOptions


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """The classifiers of the named networks at one length, on the same inputs."""
    made = []
    for name in options.mechanisms:
        if name not in network_names():
            continue
        chosen = network(name, length=length)
        config = functools.partial(_config, chosen, options, length)
        make = functools.partial(lambda config: classifier(config()), config)
        made.append(Case(name, 1 if chosen.linear_cost else 2, make))
    return made


def _config(chosen: Network, options: SpeedOptions, length: int) -> LraConfig:
    preset = PRESETS["lra-text-transnormer-t2"]
    width = options.heads * options.head_dim
    model = dataclasses.replace(
        chosen.within(dataclasses.replace(preset.model, mechanism=chosen.mechanism, late_mechanism=None)),
        d_model=width,
        num_heads=options.heads,
        d_ff=4 * width // 3,
        dtype=options.dtype,
    )
    data = dataclasses.replace(preset.data, length=length, buckets=(length,))
    loop = dataclasses.replace(preset.loop, batch=options.batch)
    return dataclasses.replace(preset, model=model, data=data, loop=loop)


def classifier(config: LraConfig, *, inference: bool = True) -> Candidate:
    """The programs of a classifier, see `candidate`, on random tokens without padding."""
    config = LRA.sized(config)
    return candidate(LRA, config, _full_batch(config), inference=inference)


def candidate(task: Task[Any, Any], config: Any, batch: Batch, *, inference: bool = True) -> Candidate:
    """Compiles and checks a training step ("train") of a run on a batch and, if asked for, inference ("forward").

    Args:
      task: the task of the run. config: its configuration, as `task.sized` returns it. batch: what its stream yields.

    Facts: "parameters", and "train_bytes", the memory of the training step: its temporary memory and its arguments.
    """
    objective = task.objective(task.build(config), config)
    mesh = open_mesh(config.mesh, config.loop, config.model)
    with jax.set_mesh(mesh):
        programs = training_programs(mesh, objective, config.optimizer, config.loop)
        state = programs.fresh()
        placed = place_batch(mesh, batch, config.loop.batch)
        compiled = programs.step.lower(state, placed).compile()
    analysis: Any = compiled.memory_analysis()
    check_room(analysis.temp_size_in_bytes)
    parameters = num_parameters(state.params)
    made = {}
    if inference:
        params = jax.tree.map(jnp.copy, state.params)
        memory = objective.init_memory(config.loop.batch)
        made["forward"] = compile_program(make_eval_step(objective), params, memory, placed.arrays)
        check_finite("loss", made["forward"].run()[0]["loss"], ())

    def step() -> Any:
        nonlocal state  # what the step is given is donated
        state, metrics = compiled(state, placed)
        return jax.block_until_ready(metrics)

    check_finite("training loss", step()["loss"], ())
    made["train"] = Program(step, analysis.temp_size_in_bytes)
    total = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return Candidate(made, {"parameters": parameters, "train_bytes": total})


def _full_batch(config: LraConfig) -> Batch:
    """A batch of random tokens without padding."""
    rng = np.random.default_rng(0)
    model = config.model
    highest = {"tokens": model.vocab_size, "targets": model.num_classes}
    arrays: dict[str, Any] = {
        name: rng.integers(0, highest.get(name, 1), like.shape).astype(like.dtype)
        for name, like in LRA.batch_shapes(config, config.loop.batch).items()
    }
    arrays["lengths"][...] = arrays["tokens"].shape[-1]
    arrays["weights"][...] = 1.0
    return Batch(arrays)
