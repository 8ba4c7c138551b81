"""The batches of a run on a task of the Long Range Arena, for classifiers and for their pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import Mesh

from train.data.lra import Source
from train.data.lra.batches import EvalBatches, TrainBatches
from train.data.lra.examples import Examples
from train.data.lra.tasks import LraDataConfig
from train.engine.config import LoopConfig
from train.engine.mesh import host_rows


class LraData(NamedTuple):
    """The examples of some splits, and where they come from."""

    source: Source
    examples: Mapping[str, Examples]


def described(config: LraDataConfig, data: LraData) -> str:
    """The data of a run in a few words."""
    counts = ", ".join(f"{len(examples):,} examples {split}" for split, examples in data.examples.items())
    return f"{config.task}, {data.source.name}, {counts}"


def training_batches(loop: LoopConfig, config: LraDataConfig, data: LraData, mesh: Mesh) -> TrainBatches:
    """The training batches; those rows that belong to this process."""
    return TrainBatches(
        data.examples["train"],
        batch=loop.batch,
        buckets=config.padded_lengths,
        seed=loop.seed,
        rows=host_rows(mesh, loop.batch),
    )


def held_out_batches(
    loop: LoopConfig, config: LraDataConfig, data: LraData, split: str, mesh: Mesh | None
) -> EvalBatches:
    """One pass over a split; on a mesh, those rows that belong to this process."""
    rows = loop.microbatch
    return EvalBatches(
        data.examples[split],
        batch=rows,
        buckets=config.padded_lengths,
        rows=None if mesh is None else host_rows(mesh, rows),
    )
