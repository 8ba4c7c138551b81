"""The smallest task one can add: does a vector of bits have an odd number of ones? Train it with python -m
tests.train.parity [OPTIONS]; `evaluation.main` measures it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Annotated

import numpy as np

from brl_jax.layers import FullConfig
from brl_jax.models import Classifier, EncoderConfig
from eval.harness.main import Evaluation
from eval.harness.options import EvalOptions
from train.cli.command import command
from train.cli.main import train_main
from train.data.repeated import RepeatedBatches
from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.tasks.lra import lra_objective
from train.tasks.run_config import RunConfig
from train.tasks.task import Task, shapes


@dataclasses.dataclass(frozen=True)
class ParityDataConfig:
    """The vectors."""

    bits: int = 4
    """Bits of a vector."""


@dataclasses.dataclass(frozen=True)
class ParityModelConfig(EncoderConfig):
    """The network."""

    vocab_size: Decided[int] = 2
    num_classes: Decided[int] = 2
    max_length: Decided[int] = 4


@dataclasses.dataclass(frozen=True)
class ParityConfig(RunConfig):
    """A classifier of vectors of bits."""

    data: Annotated[ParityDataConfig, Flat]
    model: Annotated[ParityModelConfig, Flat]


def draw(bits, seed, rows, count):
    """Random vectors; a row is the same whichever others are drawn with it."""
    drawn = np.random.default_rng(seed).integers(2, size=(count, bits)).astype(np.int32)[rows]
    ones = np.ones(len(rows), np.float32)
    lengths = np.full(len(rows), bits, np.int32)
    return {"tokens": drawn, "lengths": lengths, "targets": drawn.sum(axis=1) % 2, "weights": ones}


class HeldOut:
    """One batch of vectors."""

    num_bytes = digest = None

    def __init__(self, bits, batch, split, rows):
        self.batch, self._batch = batch, draw(bits, [1, len(split)], rows, batch)

    def __iter__(self):
        yield Batch(self._batch)


class ParityTask(Task[ParityConfig, None]):
    """Classifies vectors drawn on demand."""

    name, about, default_preset = "parity", "Trains a classifier of bits.", "parity"
    config_class, network = ParityConfig, Classifier
    presets = {  # noqa: RUF012
        "parity": ParityConfig(
            LoopConfig(steps=6, batch=8, eval_every=3, checkpoint_every=3, tensorboard=False),
            ParityDataConfig(),
            ParityModelConfig(num_layers=1, d_model=16, num_heads=2, d_ff=16, mechanism=FullConfig()),
            OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay="constant"),
        )
    }

    def sized(self, config, data=None):
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, max_length=config.data.bits)
        )

    def objective(self, model, config):
        return lra_objective(model, config.z_loss)

    def batch_shapes(self, config, rows):
        each = (rows,)
        return shapes(
            {"tokens": (rows, config.data.bits), "lengths": each, "targets": each}, {"weights": each}
        )

    def load(self, config, splits):
        return None

    def training_batches(self, config, data, *, batch, seed, rows):
        def make(index, step):
            return Batch(draw(config.data.bits, [0, seed, index], rows, batch))

        return RepeatedBatches(make, 1, {"batch": batch, "seed": seed})

    def held_out_batches(self, config, data, split, *, batch, rows):
        return HeldOut(config.data.bits, batch, split, rows)


PARITY = ParityTask()
evaluation = Evaluation([PARITY], EvalOptions(), name="tests.train.parity", about="Measures it.")


main = functools.partial(train_main, [PARITY], name="tests.train.parity")

if __name__ == "__main__":
    sys.exit(command(main, "tests.train.parity"))
