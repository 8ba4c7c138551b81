"""Rows that are drawn as they are needed: an endless stream to train on, and the same rows in every evaluation.

A configuration of such rows has their kinds in `cases`, which take turns, valid_rows and test_rows, the number of
held-out rows of each, and a method draw(case, seed, rows), whose arrays of a batch depend on these arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from train.data.repeated import RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch

# First numbers of the seeds, which keep the streams of random numbers apart.
_TRAIN, _VALID, _TEST = range(3)


class DrawnBatches(RepeatedBatches):
    """Endless training batches of fresh rows; batch s is drawn from the seed and s alone, and clears the memory."""

    def __init__(self, config: Any, *, batch: int, seed: int = 0, rows: RowNumbers = None):
        chosen = chosen_rows(batch, rows)

        def make(index: int, _: int) -> Batch:
            case = config.cases[index % len(config.cases)]
            drawn = config.draw(case, (_TRAIN, seed, index), batch)
            return Batch({name: array[chosen] for name, array in drawn.items()}, reset=np.True_)

        super().__init__(make, 1, {"batch": batch, "seed": seed})


class HeldOutDrawn:
    """The same rows in every pass of a split, none of them drawn for training; one case (by default those of training)
    after the other. The last batch of a case is padded with rows of weight 0."""

    num_bytes = digest = None

    def __init__(
        self,
        config: Any,
        *,
        batch: int,
        split: str = "valid",
        cases: Sequence[Any] | None = None,
        rows: RowNumbers = None,
    ):
        self.batch = batch
        self._draw, self._cases = config.draw, tuple(dict.fromkeys(config.cases if cases is None else cases))
        self._seed, self._count = (
            (_VALID, config.valid_rows) if split == "valid" else (_TEST, config.test_rows)
        )
        self._rows = chosen_rows(batch, rows)

    def __iter__(self) -> Iterator[Batch]:
        for case in self._cases:
            drawn = self._draw(case, (self._seed, 0, 0), self._count)
            for first in range(0, self._count, self.batch):
                numbers = first + self._rows
                exists = numbers < self._count
                batch = {name: array[np.where(exists, numbers, 0)] for name, array in drawn.items()}
                batch["weights"] = batch["weights"] * exists[:, None].astype(np.float32)
                yield Batch(batch, reset=np.True_)
