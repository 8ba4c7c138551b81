"""The Long Range Arena's data: `load` gives each split's examples, the batches group them by length."""

from train.data.lra.batches import EvalBatches, TrainBatches
from train.data.lra.examples import Examples, Source
from train.data.lra.tasks import LRA_TASKS, LraDataConfig, load

__all__ = ["LRA_TASKS", "EvalBatches", "Examples", "LraDataConfig", "Source", "TrainBatches", "load"]
