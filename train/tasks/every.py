"""All tasks by name, for what works with any of them."""

from typing import Any

from train.tasks.copy import COPY
from train.tasks.forecast import FORECAST_TASKS
from train.tasks.glue import GLUE
from train.tasks.graph import GRAPH
from train.tasks.lm import LM
from train.tasks.lra import LRA
from train.tasks.lra_denoise import LRA_DENOISE
from train.tasks.lra_trace import LRA_TRACE
from train.tasks.mlm import MLM
from train.tasks.recall import RECALL
from train.tasks.regression import REGRESSION
from train.tasks.task import Task

_TASKS: tuple[Task[Any, Any], ...] = (
    LM,
    LRA,
    LRA_DENOISE,
    LRA_TRACE,
    MLM,
    GLUE,
    GRAPH,
    COPY,
    RECALL,
    REGRESSION,
    *FORECAST_TASKS,
)
TASKS = {task.name: task for task in _TASKS}

__all__ = ["TASKS"]
