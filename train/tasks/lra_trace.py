"""Following pathfinder's paths: an encoder that says of each lit pixel whether its path has a dot.

`python -m train.lra trace-pathfinder` trains it on the marks of generated images, and `python -m train.lra pathfinder
--pretrained RUN` trains the classifier from its weights. The marks are labels that the Long Range Arena does not have:
some hundred an image. The ones near a dot are learnt first, the ones farther away later, where the arena's
one label needs a network that follows paths from end to end before it gives any gradient (docs/lra.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.models import TokenClassifier
from train.data.lra.tasks import LRA_TASKS
from train.engine.batch import Arrays, HeldOut
from train.engine.fields import Decided, Flat
from train.engine.step import Objective, classification, means, outputs, weighted_sums
from train.tasks.lra_config import PRESETS, LraModelConfig, TaskDataConfig, for_rows, recast
from train.tasks.lra_data import ArenaTask, LraData, changed_options
from train.tasks.run_config import RunConfig
from train.tasks.task import TOKEN, objective_of, shapes


@dataclasses.dataclass(frozen=True)
class TraceDataConfig(TaskDataConfig):
    """The images and the marks of their pixels."""

    marks: Decided[bool] = True
    data_dir: Decided[str | None] = None


@dataclasses.dataclass(frozen=True)
class TraceModelConfig(LraModelConfig):
    """The network."""

    pooling: Decided[str] = "mean"  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class TraceConfig(RunConfig):
    """An encoder trained to mark the paths with a dot."""

    data: Annotated[TraceDataConfig, Flat]
    model: Annotated[TraceModelConfig, Flat]


def _preset(name: str) -> TraceConfig:
    """The preset of that name, with another objective."""
    found = PRESETS[name]
    data = recast(TraceDataConfig, found.data, marks=True)
    return TraceConfig(
        found.loop, data, recast(TraceModelConfig, found.model, pooling="mean"), found.optimizer
    )


TRACING = {"trace-pathfinder": _preset("pathfinder-2d")}


def trace_objective(model: TokenClassifier, z_loss: float = 0.0) -> Objective:
    """Classification of the lit pixels of {"tokens": (B, 2, T) int32, images and marks, "lengths": (B, 2) int32,
    "weights": (B,) floats}."""

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        image, marks = batch["tokens"][:, 0], batch["tokens"][:, 1]
        logits = outputs(model, params, key, image, lengths=batch["lengths"][:, 0])
        nll, right = classification(logits, (marks == 2).astype(jnp.int32), key, z_loss)
        weights = jnp.where(marks > 0, batch["weights"][:, None], 0.0)
        return weighted_sums(nll, weights, memory, accuracy=right)

    return objective_of(model, [TOKEN], loss, averages=("accuracy",), best="accuracy")


class LraTraceTask(ArenaTask[TraceConfig]):
    """The pixels of generated images of pathfinder, each with its own class."""

    name = "lra_trace"
    about = "Trains an encoder to mark the paths of pathfinder that have a dot."
    config_class = TraceConfig
    presets = TRACING
    default_preset = "trace-pathfinder"
    network = TokenClassifier

    def sized(self, config: TraceConfig, data: LraData | None = None) -> TraceConfig:
        """Sets the tokens of the arena's task, and the two classes of a lit pixel."""
        vocab_size = LRA_TASKS[config.data.task].vocab_size
        model = for_rows(config.data, config.model, vocab_size=vocab_size, num_classes=2)
        return dataclasses.replace(config, model=model)

    def objective(self, model: TokenClassifier, config: TraceConfig) -> Objective:
        return trace_objective(model, config.z_loss)

    def batch_shapes(self, config: TraceConfig, rows: int) -> dict[str, Any]:
        tokens = (rows, 2, config.data.padded_lengths[-1])
        return shapes({"tokens": tokens, "lengths": (rows, 2), "targets": (rows,)}, {"weights": (rows,)})

    def measures(
        self, config: TraceConfig, data: LraData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        """Of the lit pixels: accuracy, loss in nats, and how many they are."""
        return {**means(sums), "pixels": round(sums["weight"])}

    def next_commands(self, config: TraceConfig, data: LraData) -> Sequence[Sequence[str]]:
        workdir = config.loop.workdir
        preset = PRESETS["pathfinder-2d"]
        network = changed_options(preset, config, ("data.valid_examples", "data.test_examples"))
        examples = config.data.train_examples or preset.data.train_examples
        # Linear probing, then fine-tuning in small steps (docs/lra.md).
        head = ("--fit_head", str(min(examples, 2_000)), "--learning_rate", "1e-4")
        return (
            ("eval.lra_probe", "--workdir", workdir),
            ("train.lra", "pathfinder-2d", "--pretrained", workdir, *head, *network),
        )


LRA_TRACE = LraTraceTask()
