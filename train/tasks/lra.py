"""The task of `python -m train.lra`: an encoder that classifies the sequences of the Long Range Arena."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.models import Classifier, PairClassifier
from train.data.lra import LRA_TASKS, EvalBatches, Examples, Source, TrainBatches, load
from train.loop import HeldOut
from train.mesh import host_rows
from train.mup import make_rates
from train.step import Batch, Objective, classification, means, random_streams
from train.task import Task
from train.tasks.lra_config import PRESETS, LraConfig


class LraData(NamedTuple):
    """The examples of some splits, and where they come from."""

    source: Source
    examples: Mapping[str, Examples]


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
            rngs=random_streams(key),
        )
        nll, right = classification(logits, batch["targets"])
        weights = batch["weights"]
        return jnp.sum(nll * weights), jnp.sum(weights), memory, {"accuracy": jnp.sum(right * weights)}

    return Objective(
        init, loss, lambda rows: None, averages=("accuracy",), best="accuracy", rates=make_rates(model.config)
    )


class LraTask(Task[LraConfig, LraData]):
    """Classification of whole sequences, or of pairs of them."""

    name = "lra"
    about = "Trains a classifier on the Long Range Arena."
    config_class = LraConfig
    presets = PRESETS
    default_preset = "listops"

    def sized(self, config: LraConfig, data: LraData | None = None) -> LraConfig:
        """The arena's task decides the tokens and the classes."""
        sizes = LRA_TASKS[config.data.task]
        model = dataclasses.replace(
            config.model,
            vocab_size=sizes.vocab_size,
            num_classes=sizes.num_classes,
            max_length=config.data.padded_lengths[-1],
        )
        return dataclasses.replace(config, model=model)

    def model(self, config: LraConfig) -> Classifier | PairClassifier:
        return (PairClassifier if LRA_TASKS[config.data.task].is_pair else Classifier)(config.model)

    def objective(self, model: Classifier | PairClassifier, config: LraConfig) -> Objective:
        return lra_objective(model)

    def batch_shapes(self, config: LraConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        pairs = (2,) if LRA_TASKS[config.data.task].is_pair else ()
        shapes = {"tokens": (rows, *pairs, config.data.padded_lengths[-1]), "lengths": (rows, *pairs)}
        shapes |= {"targets": (rows,), "weights": (rows,)}
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "weights" else jnp.int32)
            for name, shape in shapes.items()
        }

    def load(self, config: LraConfig, splits: Sequence[str]) -> LraData:
        source, examples = load(config.data, config.loop.workdir, splits)
        return LraData(source, examples)

    def describe_data(self, config: LraConfig, data: LraData) -> str:
        counts = ", ".join(f"{len(examples):,} examples {split}" for split, examples in data.examples.items())
        return f"{config.data.task}, {data.source.name}, {counts}"

    def next_commands(self, config: LraConfig, data: LraData) -> Sequence[Sequence[str]]:
        workdir = config.loop.workdir
        return ("eval.lra", "--workdir", workdir), ("eval.lra", "--table", workdir)

    def training_stream(self, config: LraConfig, data: LraData, mesh: Mesh) -> TrainBatches:
        return TrainBatches(
            data.examples["train"],
            batch=config.loop.batch,
            buckets=config.data.padded_lengths,
            seed=config.loop.seed,
            rows=host_rows(mesh, config.loop.batch),
        )

    def held_out(self, config: LraConfig, data: LraData, split: str, mesh: Mesh | None = None) -> EvalBatches:
        rows = config.loop.microbatch
        return EvalBatches(
            data.examples[split],
            batch=rows,
            buckets=config.data.padded_lengths,
            rows=None if mesh is None else host_rows(mesh, rows),
        )

    def measures(
        self, config: LraConfig, data: LraData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        """Accuracy with its standard error; chance, the accuracy of always answering the most frequent class; by how
        many standard errors the first exceeds the second; the balance of the classes; the loss."""
        metrics = means(sums)
        examples = data.examples[split]
        count = len(examples)
        balance = np.bincount(examples.labels, minlength=config.model.num_classes) / count
        accuracy, chance = metrics["accuracy"], float(balance.max())
        error = math.sqrt(accuracy * (1 - accuracy) / count)
        return {
            "accuracy": accuracy,
            "standard_error": error,
            "chance": chance,
            "errors_above_chance": (accuracy - chance) / error if error else None,
            "class_balance": balance.round(4).tolist(),
            "examples": count,
            "loss": metrics["loss"],
        }


LRA = LraTask()
