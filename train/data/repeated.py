"""Batches that are made by their number through Grain, which reads ahead: endless ones, which resume exactly, and one
pass over a held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain

from train.data.corpus import Corpus
from train.engine.batch import Batch
from train.engine.errors import UserError

# One thread reads ahead: batches come in order, and the state belongs to the last batch given, not the last read.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


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
        self._identity = identity
        self.steps_per_pass = steps

    @property
    def step(self) -> int:
        """Number of batches given since the start of training."""
        return self._inner.get_state()["next_index"]

    def __next__(self) -> Batch:
        return next(self._inner)

    def get_state(self) -> dict[str, Any]:
        """The stream's position and identity, as plain numbers and strings (JSON)."""
        return {"step": self.step, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a state of `get_state`: the next batch is the one that would have come next.

        Raises:
          UserError: the state is of other data, other sizes or another seed; the error says which.
        """
        for name, ours in self._identity.items():
            if state.get(name) != ours:
                raise UserError(f"the saved input position is of {name} {state.get(name)}, now it is {ours}")
        self._inner.set_state({"next_index": state["step"]})

    def start_prefetch(self) -> None:
        """Starts reading ahead before the first batch is requested."""
        self._inner.start_prefetch()

    def close(self) -> None:
        """Ends the reading thread; no batches can be read after that."""
        # The base class closes an object that is deleted, even one whose constructor raised.
        if "_inner" in vars(self):
            self._inner.close()


class OnePass:
    """One pass over a held-out text. Iterating again starts from the beginning.

    Args:
      make: step -> batch.
      steps: batches of the pass.
      corpus: the text.
      batch: rows of a batch, of all processes together.
      targets: the parts [low, high) of the text whose tokens are targets; those of weight 0 in the corpus do not count.

    Raises:
      UserError: no target counts.
    """

    def __init__(
        self,
        make: Callable[[int], Batch],
        steps: int,
        corpus: Corpus,
        batch: int,
        targets: Iterable[tuple[int, int]],
    ):
        self.batch = batch
        """Rows of a batch, of all processes together."""
        self.digest = corpus.digest
        """Hash of the whole text, even if only a part of it is used."""
        counted = [part for low, high in targets for part in corpus.counted(low, high)]
        self.num_targets = sum(high - low for low, high in counted)
        """Targets that count, over all processes."""
        self.num_bytes = sum(corpus.num_bytes(low, high) for low, high in counted)
        """Bytes of the original text that these targets encode."""
        if not self.num_targets:
            raise UserError(
                "--data: every token of the held-out text has the weight 0; expected some to count"
            )
        self._steps = steps
        self._dataset = grain.MapDataset.range(steps).map(make).to_iter_dataset(READ_AHEAD)

    def __len__(self) -> int:
        """Batches of the pass."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._dataset)
