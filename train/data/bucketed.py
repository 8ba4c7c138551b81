"""Batches of labelled sequences, in buckets by length so that short sequences are not padded like long ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from train.data.examples import Examples
from train.data.repeated import HeldOutBatches, RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch
from train.engine.errors import UserError


def default_buckets(length: int) -> tuple[int, ...]:
    """An eighth, a quarter, a half and all of the length."""
    return tuple(sorted({-(-length // 8), -(-length // 4), -(-length // 2), length}))


def _widths(examples: Examples, buckets: Sequence[int]) -> Int[np.ndarray, " N"]:
    """The smallest bucket that holds each example's longest sequence."""
    longest = examples.lengths.max(axis=1)
    edges = np.array(sorted(buckets))
    if longest.max() > edges[-1]:
        raise UserError(f"--buckets: the longest must hold {longest.max()} tokens, got {edges[-1]}")
    return edges[np.searchsorted(edges, longest)]


def _batch(examples: Examples, rows: Int[np.ndarray, " B"], width: int) -> Batch:
    parts = examples.lengths.shape[1]
    tokens = np.zeros((len(rows), parts, width), np.int32)
    lengths = np.ones((len(rows), parts), np.int32)
    targets = np.zeros(len(rows), np.int32)
    for b, index in enumerate(rows.tolist()):
        if index >= 0:
            for p, sequence in enumerate(examples[index]):
                tokens[b, p, : len(sequence)] = sequence
            lengths[b] = examples.lengths[index]
            targets[b] = examples.labels[index]
    if parts == 1:
        tokens, lengths = tokens[:, 0], lengths[:, 0]
    weights = (rows >= 0).astype(np.float32)
    return Batch({"tokens": tokens, "lengths": lengths, "targets": targets, "weights": weights})


class TrainBatches(RepeatedBatches):
    """Endless training batches; each pass has every example at most once, in a new order.

    A batch is {"tokens": (B, T) or, for pairs, (B, 2, T) int32, zeros after each sequence's end, "lengths": (B,)
    or (B, 2) int32, "targets": (B,) int32, "weights": (B,) float32 ones}; T is the batch's bucket.
    The remainder of a bucket fills a batch of the next longer one, and a remainder of less than a batch, different in
    each pass, is left out.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        batch: int,
        buckets: Sequence[int],
        seed: int = 0,
        rows: RowNumbers = None,
    ):
        chosen = chosen_rows(batch, rows)
        if len(examples) < batch:
            raise UserError(f"--batch: expected at most the {len(examples)} training examples, got {batch}")
        widths = _widths(examples, buckets)
        steps = len(examples) // batch

        @functools.lru_cache(maxsize=2)
        def plan(number: int) -> tuple[Int[np.ndarray, "S B"], Int[np.ndarray, " S"]]:
            """A pass: the examples of each batch, and the lengths they are padded to."""
            rng = np.random.default_rng([seed, number])
            order = rng.permutation(len(examples))[: steps * batch]
            # Stable: a bucket's examples stay in random order; a batch that spans two buckets is padded to the longer.
            order = order[np.argsort(widths[order], kind="stable")].reshape(steps, batch)
            order = order[rng.permutation(steps)]  # so that lengths don't grow during a pass
            return order, widths[order].max(axis=1)

        def make(index: int, step: int) -> Batch:
            order, padded = plan(index // steps)
            return _batch(examples, order[step, chosen], int(padded[step]))

        identity = {
            "batch": batch,
            "buckets": sorted(buckets),
            "seed": seed,
            "examples": len(examples),
            "digest": examples.digest,
        }
        super().__init__(make, steps, identity)


class EvalBatches(HeldOutBatches):
    """One pass over a split, by length: every example once; the padding of the last batch of a bucket has weight 0.

    Batches look like `TrainBatches`'. With `limit` there are only the first examples.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        batch: int,
        buckets: Sequence[int],
        limit: int = 0,
        rows: RowNumbers = None,
    ):
        chosen = chosen_rows(batch, rows)
        widths = _widths(examples, buckets)[: limit or None]
        plans = []
        for width in np.unique(widths):
            members = np.flatnonzero(widths == width)
            filled = np.full(-(-len(members) // batch) * batch, -1)
            filled[: len(members)] = members
            plans += [(row, int(width)) for row in filled.reshape(-1, batch)]

        def make(step: int) -> Batch:
            row, width = plans[step]
            return _batch(examples, row[chosen], width)

        super().__init__(make, len(plans), batch, examples.digest)
