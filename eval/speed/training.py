"""Whole networks, inference and a training step: classifiers, encoder-decoders and decoders in the papers' settings.

Classifiers (TransNormer, arXiv:2210.10340, table 7) have every mechanism that has a bidirectional form.
Encoder-decoders (BRL-Attention, OpenReview Vpyg3fqXbl, figure 5) are the presets `figure5-NAME` of `train.copy`.
Decoders (tables 6 and 7) are presets `wikitext103-NAME` of `train.lm`: "brl-paper" has one block of the row's length
and as long a history, as section A.2 says, and "brl" is our own form. Inference is the loss without gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from brl_jax.layers import BRLConfig, LinformerConfig
from eval.harness.batches import make_batch
from eval.speed.measure import (
    Candidate,
    Case,
    Program,
    check_finite,
    check_memory,
    compile_program,
)
from eval.speed.networks import Network, network, network_names
from eval.speed.options import SpeedOptions
from train.cli.summary import num_parameters
from train.engine.mesh import place_batch, training_programs
from train.engine.step import make_eval_step
from train.engine.throughput import step_flops
from train.tasks import lm_config, lra_config
from train.tasks.copy import COPY, CopyConfig
from train.tasks.lm import LM
from train.tasks.lra import LRA
from train.tasks.task import Task

_FIGURE_5 = "figure5-"
ENCODER_DECODERS = tuple(
    preset.removeprefix(_FIGURE_5) for preset in COPY.presets if preset.startswith(_FIGURE_5)
)
_DECODERS = {
    "full": "wikitext103-full",
    "local": "wikitext103-local",
    "brl-paper": "wikitext103-brl-paper-128",
    "brl": "wikitext103-brl",
}
DECODERS = tuple(_DECODERS)


def candidate(task: Task[Any, Any], config: Any, *, inference: bool = True) -> Candidate:
    """Compiles and checks a training step ("train") of a run on random numbers and, if asked for, inference
    ("forward"). The configuration is as `task.sized` returns it.

    Facts: "parameters", "flops" of the forward pass's matrix products, and "train_bytes", the memory of the training
    step: its temporary memory and its arguments.
    """
    objective = task.objective(task.build(config), config)
    mesh = task.open_mesh(config)
    with jax.set_mesh(mesh):
        programs = training_programs(mesh, objective, config.optimizer, config.loop)
        state = programs.fresh()
        batch = make_batch(task, config)
        placed = place_batch(mesh, batch, config.loop.batch)
        lowered = programs.step.lower(state, placed)
    compiled = lowered.compile()
    analysis: Any = compiled.memory_analysis()
    check_memory(analysis.temp_size_in_bytes)
    facts = {
        "parameters": num_parameters(state.params),
        "flops": step_flops(objective, state.params, batch.arrays) / 3,
    }
    made = {}
    if inference:
        params = jax.tree.map(jnp.copy, state.params)
        memory = objective.init_memory(config.loop.batch)
        made["forward"] = compile_program(make_eval_step(objective), params, memory, placed.arrays)
        check_finite("loss", made["forward"].run()[0]["loss"], ())

    def step() -> Any:
        nonlocal state  # the step donates its argument
        state, metrics = compiled(state, placed)
        return metrics

    made["train"] = Program(step, analysis.temp_size_in_bytes)
    check_finite("training loss", made["train"].run()["loss"], ())
    total = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return Candidate(made, {**facts, "train_bytes": total})


def classifiers(options: SpeedOptions, length: int) -> list[Case]:
    """The classifiers of the named networks at one length, on the same inputs."""

    def make(chosen: Network) -> Candidate:
        return candidate(LRA, LRA.sized(_classifier_config(chosen, options, length)))

    named = {name: network(name, length=length) for name in network_names() if options.wants(name)}
    return [
        Case(name, 1 if chosen.linear_cost else 2, functools.partial(make, chosen))
        for name, chosen in named.items()
    ]


def _classifier_config(chosen: Network, options: SpeedOptions, length: int) -> lra_config.LraConfig:
    preset = lra_config.PRESETS["lra-text-transnormer-t2"]
    model = dataclasses.replace(
        chosen.within(dataclasses.replace(preset.model, mechanism=chosen.mechanism, late_mechanism=None)),
        d_model=options.width,
        num_heads=options.heads,
        d_ff=4 * options.width // 3,
        dtype=options.dtype,
    )
    data = dataclasses.replace(preset.data, length=length, buckets=(length,))
    loop = dataclasses.replace(preset.loop, batch=options.batch)
    return dataclasses.replace(preset, model=model, data=data, loop=loop)


def encoder_decoders(options: SpeedOptions, length: int) -> list[Case]:
    """The named encoder-decoders at one length, on the same inputs."""
    made = []
    for name in filter(options.wants, ENCODER_DECODERS):
        config = _copy_config(_FIGURE_5 + name, options, length)
        model = config.model
        linear = model.cross_window is not None and all(
            mechanism.linear_cost for mechanism in (*model.mechanisms, *model.encoder.mechanisms)
        )
        made.append(
            Case(name, 1 if linear else 2, functools.partial(candidate, COPY, config, inference=False))
        )
    return made


def _copy_config(preset: str, options: SpeedOptions, length: int) -> CopyConfig:
    config = COPY.presets[preset]
    encoder = config.model.encoder_mechanism
    if isinstance(encoder, LinformerConfig):
        encoder = dataclasses.replace(encoder, max_length=length)
    sizes: dict[str, Any] = {"d_model": options.width, "num_heads": options.heads, "d_ff": 4 * options.width}
    model = dataclasses.replace(config.model, encoder_mechanism=encoder, dtype=options.dtype, **sizes)
    data = dataclasses.replace(config.data, length=(length,), min_length=length)
    loop = dataclasses.replace(config.loop, batch=options.batch)
    return COPY.sized(dataclasses.replace(config, model=model, data=data, loop=loop))


def decoders(options: SpeedOptions, length: int) -> list[Case]:
    """The named decoders at one length, on the same inputs."""
    made = []
    for name in filter(options.wants, DECODERS):
        config = decoder_config(name, options, length)
        growth = 1 if config.model.mechanism.linear_cost else 2
        made.append(Case(name, growth, functools.partial(candidate, LM, config)))
    return made


def decoder_config(name: str, options: SpeedOptions, length: int) -> lm_config.LmConfig:
    """The run of a decoder: its preset's network at the width of the options."""
    preset = lm_config.PRESETS[_DECODERS[name]]
    mechanism = preset.model.mechanism
    if isinstance(mechanism, BRLConfig) and mechanism.memory == "output":
        mechanism = dataclasses.replace(mechanism, block_size=length, history_size=length)
    sizes: dict[str, Any] = {"d_model": options.width, "num_heads": options.heads, "d_ff": 4 * options.width}
    sizes["mechanism"] = mechanism
    model = dataclasses.replace(preset.model, dropout=0.0, dtype=options.dtype, **sizes)
    loop = dataclasses.replace(preset.loop, batch=options.batch, accumulation=1, length=length)
    return LM.sized(dataclasses.replace(preset, model=model, loop=loop))
