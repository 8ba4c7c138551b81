"""Trains a classifier on a task of the Long Range Arena: python -m train.lra TASK [OPTIONS], or a preset's name.

TASK is listops, text, retrieval, image, pathfinder or pathx, each at a size for two CPU cores; `lra-TASK-NAME` are
the papers' settings (train/lra_presets.py). listops, pathfinder and pathx are generated where --data_dir names no
files. The run's folder holds config.json, metrics.jsonl and checkpoints/; the same command again goes on where the run
stopped, bit for bit as if it had not. `python -m eval.lra --workdir DIR` measures it on the test split.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.models import Classifier, PairClassifier
from train.config import parse, to_json
from train.data.lra import TASKS, EvalBatches, TrainBatches, load
from train.data.lra.examples import Examples
from train.errors import UserError, command
from train.hosts import join, lead_first
from train.loop import train
from train.lra_config import LraConfig
from train.lra_presets import PRESETS
from train.mesh import held_rows, open_mesh
from train.metrics import say
from train.mup import make_rates
from train.step import Batch, Objective


def lra_objective(model: Classifier | PairClassifier) -> Objective:
    """Classification of {"tokens": (B, [2,] T), "lengths": (B, [2]), "targets": (B,)} int32, "weights": (B,) floats."""
    pair = isinstance(model, PairClassifier)

    def init(key: Array) -> Any:
        return model.init(key, jnp.zeros((1, 2, 1) if pair else (1, 1), jnp.int32))["params"]

    def loss(params: Any, memory: Any, batch: Batch, key: Array | None):
        logits: Any = model.apply(
            {"params": params},
            batch["tokens"],
            lengths=batch["lengths"],
            deterministic=key is None,
            rngs={} if key is None else {"dropout": key},
        )
        weights, targets = batch["weights"], batch["targets"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = (logits.argmax(axis=-1).astype(targets.dtype) == targets).astype(jnp.float32)
        return jnp.sum(nll * weights), jnp.sum(weights), memory, {"accuracy": jnp.sum(right * weights)}

    return Objective(
        init, loss, lambda rows: None, averages=("accuracy",), best="accuracy", rates=make_rates(model.config)
    )


def for_task(config: LraConfig) -> LraConfig:
    """The configuration with what the task decides of the network."""
    task = TASKS[config.data.task]
    model = dataclasses.replace(
        config.model,
        vocab_size=task.vocab_size,
        num_classes=task.num_classes,
        max_length=config.data.padded_lengths[-1],
    )
    return dataclasses.replace(config, model=model)


def batch_shapes(config: LraConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of so many rows (see `lra_objective`)."""
    pairs = (2,) if TASKS[config.data.task].is_pair else ()
    shapes = {"tokens": (rows, *pairs, config.data.padded_lengths[-1]), "lengths": (rows, *pairs)}
    shapes |= {"targets": (rows,), "weights": (rows,)}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "weights" else jnp.int32)
        for name, shape in shapes.items()
    }


def build_model(config: LraConfig) -> Classifier | PairClassifier:
    """The model of a configuration, tried on a batch's shapes.

    Raises:
      UserError: its parts don't fit each other or the batch.
    """
    pair = TASKS[config.data.task].is_pair
    batch = batch_shapes(config, config.loop.batch // config.loop.accumulation)
    try:
        model = (PairClassifier if pair else Classifier)(config.model)
        objective = lra_objective(model)
        jax.eval_shape(
            lambda key, batch: objective.sums(objective.init(key), None, batch, key), jax.random.key(0), batch
        )
    except ValueError as error:
        raise UserError(f"the model's options do not fit: {error}") from error
    return model


def held_out_batches(examples: Examples, config: LraConfig, mesh: Mesh | None = None) -> EvalBatches:
    """One pass over a held-out split in batches of a microbatch's rows; on a mesh, those of this process."""
    rows = config.loop.batch // config.loop.accumulation
    held = None if mesh is None else held_rows(mesh, rows)
    return EvalBatches(examples, batch=rows, buckets=config.data.padded_lengths, rows=held)


def main(argv: Sequence[str]) -> None:
    """Trains; see the module's text and --help."""
    config = parse(
        PRESETS,
        "listops",
        argv,
        prog="python -m train.lra",
        about="Trains a classifier on the Long Range Arena.",
    )
    config = for_task(config)
    join(config.hosts)
    mesh = open_mesh(config.mesh, config.loop, config.model)
    model = build_model(config)
    with lead_first("data"):
        source, examples = load(config.data, config.loop.workdir, ("train", "valid"))
    say(f"{config.data.task}: {source.name}, {len(examples['train'])} training examples")
    stream = TrainBatches(
        examples["train"],
        batch=config.loop.batch,
        buckets=config.data.padded_lengths,
        seed=config.loop.seed,
        rows=held_rows(mesh, config.loop.batch),
    )
    held_out = held_out_batches(examples["valid"], config, mesh)
    train(
        lra_objective(model),
        config.loop,
        config.optimizer,
        config=to_json(config),
        stream=stream,
        held_out=held_out,
        mesh=mesh,
    )
    say(f"done: {config.loop.workdir}; python -m eval.lra --workdir {config.loop.workdir} tests it")


if __name__ == "__main__":
    sys.exit(command(main, "train.lra"))
