"""Batches that are made by their number through Grain, which reads ahead: endless ones, which resume exactly, and one
pass over held-out data.

All classes of batches in train/data take `batch`, the rows of all processes together, and `rows`, the indices of those
to give (all by default). Their state is the number of batches given so far, whichever rows they have, so that any
number of processes may go on, and restoring it reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from train.data.corpus import Corpus
from train.engine.batch import Batch
from train.engine.errors import UserError

# One thread reads ahead: batches come in order, and the state belongs to the last batch given, not the last read.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


RowNumbers = Sequence[int] | np.ndarray | None
"""The indices of the rows to give; None: all."""


def chosen_rows(batch: int, rows: RowNumbers) -> Int[np.ndarray, " rows"]:
    """The indices of the rows to give, by default all."""
    return np.arange(batch) if rows is None else np.asarray(rows)


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises UserError for a state of other data, other sizes or another seed; the error says which."""
    for name, ours in identity.items():
        if state.get(name) != ours:
            raise UserError(f"the saved input position is of {name} {state.get(name)}, now it is {ours}")


class RepeatedBatches(grain.DatasetIterator):
    """An endless iterator over batches made by number, whose state is the number of the next one.

    Args:
      make: (index, step) -> batch; index counts all batches since the start of training, step the batches of the pass.
      steps: batches of a pass.
      identity: what the batches depend on (sizes, seed, the data's digest): numbers and strings by name.
    """

    def __init__(self, make: Callable[[int, int], Batch], steps: int, identity: dict[str, Any]):
        dataset = grain.MapDataset.range(steps).repeat().map_with_index(make)
        self._inner = iter(dataset.to_iter_dataset(READ_AHEAD))
        super().__init__(self._inner)
        self.make, self.steps_per_pass, self.identity = make, steps, identity

    @property
    def step(self) -> int:
        """Number of batches given since the start of training."""
        return self._inner.get_state()["next_index"]

    def __next__(self) -> Batch:
        return next(self._inner)

    def get_state(self) -> dict[str, Any]:
        """The stream's position and identity, as plain numbers and strings (JSON)."""
        return {"step": self.step, **self.identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a state of `get_state`: the next batch is the one that would have come next; see `check_identity`."""
        check_identity(state, self.identity)
        self._inner.set_state({"next_index": state["step"]})

    def close(self) -> None:
        """Ends the reading thread; no batches can be read after that."""
        # The base class closes an object that is deleted, even one whose constructor raised.
        if "_inner" in vars(self):
            self._inner.close()


class HeldOutBatches:
    """One pass over batches made by number. Iterating again starts from the beginning."""

    def __init__(
        self,
        make: Callable[[int], Batch],
        steps: int,
        batch: int,
        digest: str | None = None,
        num_bytes: int | None = None,
    ):
        self.make, self.batch, self.digest, self.num_bytes = make, batch, digest, num_bytes
        self._steps = steps
        self._dataset = grain.MapDataset.range(steps).map(make).to_iter_dataset(READ_AHEAD)

    def __len__(self) -> int:
        """Batches of the pass."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._dataset)


class HeldOutText(HeldOutBatches):
    """One pass over a held-out text.

    Args:
      corpus: the text, all of which is hashed, even if only a part of it is used.
      targets: the parts [low, high) of the text whose tokens are targets; those of weight 0 in the corpus do not count.
    """

    def __init__(
        self,
        make: Callable[[int], Batch],
        steps: int,
        corpus: Corpus,
        batch: int,
        targets: Iterable[tuple[int, int]],
    ):
        counted = [part for low, high in targets for part in corpus.counted(low, high)]
        self.num_targets = sum(high - low for low, high in counted)
        """Targets that count, over all processes."""
        if not self.num_targets:
            raise UserError(
                "--data: every token of the held-out text has the weight 0; expected some to count"
            )
        num_bytes = sum(corpus.num_bytes(low, high) for low, high in counted)
        super().__init__(make, steps, batch, corpus.digest, num_bytes)
