"""Batches whose rows hold whole documents, kept apart by their segment ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from train.data.corpus import Corpus
from train.data.repeated import HeldOutText, RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch
from train.engine.errors import UserError

Pieces = list[tuple[int, int]]
"""Parts [start, stop) of a text that share a row."""


def fill_rows(corpus: Corpus, order: Iterable[int], length: int, stop: int) -> list[Pieces]:
    """Rows of up to `length` targets, each of whole documents in this order.

    A document that is longer than a row continues in the next one, from the last token of the row before.
    """
    ends = [*corpus.starts[1:].tolist(), stop]
    rows: list[Pieces] = []
    left = 0
    for number in order:
        start, end = int(corpus.starts[number]), min(ends[number], stop)
        while end - start >= 2:
            piece = start, min(end, start + length + 1)
            size = piece[1] - piece[0]
            # Two documents are neighbours in a row: the last token of one has the first of the other as its target.
            if size > left:
                rows.append([])
                left = length + 1
            rows[-1].append(piece)
            left -= size
            start = piece[1] - 1
    return rows


def arrays_of(corpus: Corpus, rows: Sequence[Pieces], length: int) -> dict[str, np.ndarray]:
    """Rows as {"tokens", "targets", "segment_ids": (B, T) int32, "weights": (B, T) float32}: the weight is
    0 where the row ends or the target is of another document."""
    text = np.zeros((len(rows), length + 1), np.int32)
    segments = np.full((len(rows), length + 1), -1, np.int32)
    weights = np.zeros((len(rows), length + 1), np.float32)
    for row, pieces in enumerate(rows):
        at = 0
        for number, (start, stop) in enumerate(pieces):
            places = slice(at, at + stop - start)
            text[row, places] = corpus.tokens[start:stop]
            segments[row, places] = number
            weights[row, places] = corpus.weights_at(np.arange(start, stop))
            weights[row, at] = 0.0
            at += stop - start
        segments[row, at:] = len(pieces)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "segment_ids": segments[:, :-1],
        "weights": weights[:, 1:],
    }


class PackedStreams(RepeatedBatches):
    """Endless training batches of rows of whole documents, see `arrays_of`. The seed decides which documents share a
    row, and with the number of the pass the order of the rows. Nothing is carried from batch to batch.
    """

    def __init__(self, corpus: Corpus, *, batch: int, length: int, seed: int = 0, rows: RowNumbers = None):
        chosen = chosen_rows(batch, rows)
        order = np.random.default_rng([seed]).permutation(len(corpus.starts))
        filled = fill_rows(corpus, order.tolist(), length, len(corpus.tokens))
        _check_any(filled, "training")
        steps = max(1, len(filled) // batch)

        def make(index: int, step: int) -> Batch:
            shuffled = np.random.default_rng([seed, index // steps]).permutation(len(filled))
            own = shuffled[(step * batch + chosen) % len(filled)]
            return Batch(arrays_of(corpus, [filled[row] for row in own], length), reset=np.True_)

        identity = {
            "batch": batch,
            "length": length,
            "seed": seed,
            "digest": corpus.digest,
            "rows": len(filled),
        }
        super().__init__(make, steps, identity)


class PackedHeldOut(HeldOutText):
    """One pass over the documents of a text, in rows as `PackedStreams` has them: every token but the first of each
    document is a target once, unless its weight in the corpus is 0.
    """

    def __init__(
        self, corpus: Corpus, *, batch: int, length: int, limit: int | None = None, rows: RowNumbers = None
    ):
        chosen = chosen_rows(batch, rows)
        stop = min(len(corpus.tokens), limit or len(corpus.tokens))
        within = int(np.searchsorted(corpus.starts, stop))
        filled = fill_rows(corpus, range(within), length, stop)
        _check_any(filled, "held-out")
        targets = [(start + 1, stop) for pieces in filled for start, stop in pieces]
        steps = -(-len(filled) // batch)
        filled += [[]] * (steps * batch - len(filled))

        def make(step: int) -> Batch:
            arrays = arrays_of(corpus, [filled[step * batch + row] for row in chosen], length)
            weights = (arrays["weights"] > 0).astype(np.float32)
            return Batch({**arrays, "weights": weights}, reset=np.True_)

        super().__init__(make, steps, corpus, batch, targets)


def _check_any(rows: Sequence[Pieces], name: str) -> None:
    if not rows:
        raise UserError(f"--data: no document of the {name} text has two tokens; expected some to predict")
