"""What runs on a task of the Long Range Arena have in common, classifiers and their pretraining: the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from train.data.lra.batches import EvalBatches, TrainBatches
from train.data.lra.examples import Examples, Source
from train.data.lra.tasks import load
from train.tasks.task import C, Task


class LraData(NamedTuple):
    """The examples of some splits, and where they come from."""

    source: Source
    examples: Mapping[str, Examples]


class ArenaTask(Task[C, LraData]):
    """A task on the sequences of the arena."""

    def load(self, config: C, splits: Sequence[str]) -> LraData:
        return LraData(*load(config.data, config.loop.workdir, splits))

    def describe_data(self, config: C, data: LraData) -> str:
        counts = ", ".join(f"{len(examples):,} examples {split}" for split, examples in data.examples.items())
        return f"{config.data.task}, {data.source.name}, {counts}"

    def training_batches(self, config: C, data: LraData, **options: Any) -> Any:
        return TrainBatches(data.examples["train"], buckets=config.data.padded_lengths, **options)

    def held_out_batches(self, config: C, data: LraData, split: str, **options: Any) -> Any:
        return EvalBatches(data.examples[split], buckets=config.data.padded_lengths, **options)
