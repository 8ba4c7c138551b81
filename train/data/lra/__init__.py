"""The Long Range Arena's data: `load` gives each split's examples, the batches cut them by length."""

from train.data.lra.batches import EvalBatches, TrainBatches
from train.data.lra.tasks import TASKS, LraDataConfig, Task, load

__all__ = ["TASKS", "EvalBatches", "LraDataConfig", "Task", "TrainBatches", "load"]
