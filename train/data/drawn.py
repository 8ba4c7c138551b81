"""Rows that are drawn as they are needed: an endless stream to train on, and the same rows in every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from train.data.repeated import RepeatedBatches
from train.data.streams import check_rows
from train.engine.batch import Batch
from train.engine.errors import UserError

# First numbers of the seeds, which keep the streams of random numbers apart.
_TRAIN, _VALID, _TEST = range(3)

Draw = Callable[[Any, Sequence[int], int], dict[str, Any]]
"""(case, seed, number of rows) -> the arrays of a batch, which depend on these alone."""


class DrawnBatches(RepeatedBatches):
    """Endless training batches of fresh rows; batch s is drawn from the seed and s alone.

    A batch is what `draw` returns; each clears the memory. The cases take turns. One of several processes yields
    some of the rows. The state is the number of batches so far.

    Args:
      draw: what draws a batch. cases: what it draws, in turn. batch: rows of all processes together. seed: of all of
        them. rows: the indices of this process's rows; all by default.

    Raises:
      UserError: batch or seed out of range.
    """

    def __init__(
        self,
        draw: Draw,
        cases: Sequence[Any],
        *,
        batch: int,
        seed: int = 0,
        rows: Sequence[int] | np.ndarray | None = None,
    ):
        if seed < 0:
            raise UserError(f"--seed: expected 0 or more, got {seed}")
        chosen = check_rows(batch, rows)

        def make(index: int, _: int) -> Batch:
            drawn = draw(cases[index % len(cases)], (_TRAIN, seed, index), batch)
            return Batch({name: array[chosen] for name, array in drawn.items()}, reset=np.True_)

        super().__init__(make, 1, {"batch": batch, "seed": seed})


class HeldOutDrawn:
    """The same rows in every pass, none of them drawn for training; one case after the other.

    Args:
      draw, cases: as for `DrawnBatches`. count: rows of each case. batch: rows of all processes together; the last
        batch of a case is padded with rows of weight 0. split: "valid" or "test". rows: the indices of this process's
        rows; all by default.
    """

    num_bytes = digest = None

    def __init__(
        self,
        draw: Draw,
        cases: Sequence[Any],
        *,
        count: int,
        batch: int,
        split: str = "valid",
        rows: Sequence[int] | np.ndarray | None = None,
    ):
        self.batch = batch
        self._draw, self._cases, self._count = draw, tuple(dict.fromkeys(cases)), count
        self._rows, self._seed = check_rows(batch, rows), _VALID if split == "valid" else _TEST

    def __iter__(self) -> Iterator[Batch]:
        for case in self._cases:
            drawn = self._draw(case, (self._seed, 0, 0), self._count)
            for first in range(0, self._count, self.batch):
                numbers = first + self._rows
                exists = numbers < self._count
                batch = {name: array[np.where(exists, numbers, 0)] for name, array in drawn.items()}
                batch["weights"] = batch["weights"] * exists[:, None].astype(np.float32)
                yield Batch(batch, reset=np.True_)
