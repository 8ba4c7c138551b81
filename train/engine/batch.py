"""What the loop trains and evaluates on: batches, and the streams that give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from train.engine.errors import UserError

Arrays = Mapping[str, Any]
"""Arrays by name; the first dimension of each counts rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of one step.

    Attributes:
      arrays: what the task's loss reads.
      reset: whether the memory that is carried from batch to batch is cleared first.
    """

    arrays: Arrays
    reset: Any = np.False_

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def with_arrays(self, **arrays: Any) -> Batch:
        """The batch with these arrays replaced or added."""
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})


def stacked(batches: Sequence[Batch]) -> Batch:
    """Batches of one shape as one, whose arrays have the number of the batch in front."""
    try:
        return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
    except ValueError as error:
        raise UserError("--dispatch: expected 1, as the shapes of the batches differ") from error


def num_rows(arrays: Arrays) -> int:
    """The number of rows of a batch's arrays."""
    return next(iter(arrays.values())).shape[0]


def num_tokens(arrays: Arrays) -> int:
    """The number of tokens in a batch's arrays, including padding."""
    return next(iter(arrays.values())).size


class Stream(Protocol):
    """Endless training batches whose position can be saved."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class HeldOut(Protocol):
    """One pass over held-out data.

    Attributes:
      batch: rows of a batch, over all processes.
      num_bytes: bytes of text that the targets cover; None unless the data are text.
      digest: a hash of the data; None if the configuration or the training stream's state identifies them.
    """

    @property
    def batch(self) -> int: ...
    @property
    def num_bytes(self) -> int | None: ...
    @property
    def digest(self) -> str | None: ...
    def __iter__(self) -> Iterator[Batch]: ...
