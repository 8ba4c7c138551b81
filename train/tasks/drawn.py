"""What tasks share whose rows are drawn as they are needed, so that there is nothing to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from train.data.drawn import DrawnBatches, HeldOutDrawn
from train.engine.batch import HeldOut
from train.tasks.task import C, Task


class DrawnTask(Task[C, None]):
    """A task on rows that the configuration's `data` draws.

    Attributes:
      held_out_rows: the rows to evaluate on, from `data`, batch, split and rows.
    """

    held_out_rows: Callable[..., HeldOut] = HeldOutDrawn

    def load(self, config: C, splits: Sequence[str]) -> None:
        return None

    def training_batches(self, config: C, data: None, **options: Any) -> DrawnBatches:
        return DrawnBatches(config.data, **options)

    def held_out_batches(self, config: C, data: None, split: str, **options: Any) -> HeldOut:
        return self.held_out_rows(config.data, split=split, **options)
