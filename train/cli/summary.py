"""What a command prints about a run before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from brl_jax.models import EncoderDecoderConfig, GraphConfig, StackConfig
from train.engine.config import LoopConfig
from train.engine.metrics import clock
from train.engine.step import Objective, perplexity
from train.tasks.run_config import RunConfig


def num_parameters(params: Any) -> int:
    """The number of parameters in a pytree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def parameters_in_words(objective: Objective) -> str:
    """How many parameters a network has, and how many of them are trained."""
    params = jax.eval_shape(objective.init, jax.random.key(0))
    trained, _ = objective.split(params)
    share = "" if objective.trained is None else f", {num_parameters(trained):,} of them trained"
    return f"{num_parameters(params):,} parameters{share}"


def mechanism_names(config: StackConfig) -> str:
    """The names of a network's mechanisms, for people: "diag+norm", "linformer to full" if encoder and decoder differ,
    or the name of a network without attention."""
    if isinstance(config, GraphConfig) and config.network not in ("tokens", "nodes"):
        return config.network
    used = (config.mechanism, config.late_mechanism)
    names = "+".join(dict.fromkeys(mechanism.name for mechanism in used if mechanism is not None))
    encoder = config.encoder_mechanism if isinstance(config, EncoderDecoderConfig) else None
    return names if encoder is None else f"{encoder.name} to {names}"


def beginning(config: RunConfig, *, parameters: str, mesh: Mesh, data: str, tokens: int) -> list[str]:
    """The lines before training."""
    loop, model = config.loop, config.model
    devices = mesh.devices.size
    divided = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "not divided"
    kind = mesh.devices.flat[0].device_kind
    return [
        f"model: {mechanism_names(model)}, layers {model.num_layers} x {model.d_model}, {parameters}",
        f"devices: {devices} ({kind}), mesh: {divided}",
        f"data: {data}",
        f"training: {loop.steps:,} steps of {tokens:,} tokens ({loop.batch} rows), in {loop.workdir}",
    ]


def ending(loop: LoopConfig, *, step: int, seconds: float, measured: Mapping[str, float]) -> str:
    """The line after training. A text's last evaluation has bits per byte, and the perplexity is shown too."""
    values = {name.removeprefix("val_").replace("_", " "): value for name, value in measured.items()}
    if "bits per byte" in values:
        values = {"perplexity": perplexity(measured["val_loss"]), **values}
    if "loss" in values:
        values = {"loss": values.pop("loss"), **values}
    shown = "".join(f", {name} {value:.4f}" for name, value in values.items())
    held_out = f"; held-out{shown[1:]}" if shown else ""
    return f"done: {step:,} steps in {loop.workdir}, {clock(seconds)}{held_out}"
