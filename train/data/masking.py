"""Sequences with some tokens masked, differently in every batch, for masked language models (arXiv:1810.04805).

In every row the network must predict a share of the tokens. Of these, 80% are replaced by the mask, 10% by a random
token, and 10% stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from train.data.repeated import HeldOutBatches, RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch

# First numbers of the seeds, which keep the masks of the splits apart.
_TRAIN, _VALID = range(2)
_MASKED, _RANDOM = 0.8, 0.9


def num_asked(length: int, share: float) -> int:
    """How many tokens of a row the network must predict, at least one."""
    return max(1, round(share * length))


def mask_tokens(
    tokens: Int[np.ndarray, "R T"],
    exists: Float[np.ndarray, "R T"],
    *,
    share: float,
    vocab_size: int,
    mask: int,
    seed: Sequence[int],
    rows: Int[np.ndarray, " R"],
) -> dict[str, np.ndarray]:
    """A batch of masked rows.

    Args:
      tokens: the text. exists: 1 where a token exists, which is in front, and 0 in padding.
      share: of the tokens of a row that the network must predict. vocab_size: random tokens are below it.
      mask: the token of the mask. seed: of the whole batch.
      rows: the numbers of these rows in the batch; a row's masks do not depend on the process that has it.

    Returns:
      "tokens" (R, T) int32, "places" (R, P) int32 in ascending order, "targets" (R, P) int32, the tokens that stood
      there, "weights" (R, P) float32, 0 for places of padding, and "lengths" (R,) int32.
    """
    length = tokens.shape[1]
    count = num_asked(length, share)
    places, kinds, noise = [], [], []
    for row in rows:
        rng = np.random.default_rng([*seed, int(row)])
        places.append(np.sort(rng.permutation(length)[:count]))
        kinds.append(rng.random(count))
        noise.append(rng.integers(vocab_size, size=count))
    at, kind, random = np.stack(places), np.stack(kinds), np.stack(noise)
    targets = np.take_along_axis(tokens, at, axis=1)
    shown = np.where(kind < _MASKED, mask, np.where(kind < _RANDOM, random, targets))
    masked = tokens.copy()
    np.put_along_axis(masked, at, shown, axis=1)
    return {
        "tokens": masked.astype(np.int32),
        "places": at.astype(np.int32),
        "targets": targets.astype(np.int32),
        "weights": np.take_along_axis(exists, at, axis=1).astype(np.float32),
        "lengths": np.maximum(exists.sum(axis=1), 1).astype(np.int32),
    }


class MaskedBatches(RepeatedBatches):
    """Endless training batches of `mask_tokens`, made from another stream's batches. They keep its reset and
    its "segment_ids", if it has them. Masks depend on the seed and the number of the batch alone.

    Args:
      batches: "tokens" (B, T) and, where rows end early, "lengths" (B,).
      masking: vocab_size, mask and share of `mask_tokens`.
    """

    def __init__(
        self,
        batches: RepeatedBatches,
        *,
        batch: int,
        seed: int = 0,
        rows: RowNumbers = None,
        **masking: Any,
    ):
        chosen = chosen_rows(batch, rows)

        def make(index: int, step: int) -> Batch:
            return _masked(batches.make(index, step), seed=(_TRAIN, seed, index), rows=chosen, **masking)

        super().__init__(make, batches.steps_per_pass, batches.identity)


class MaskedHeldOut(HeldOutBatches):
    """One pass over held-out batches, as batches of `mask_tokens`; every pass masks the same tokens.

    Args:
      batches: "tokens" (B, T), and the "weights" (B, T) of tokens, or "lengths" (B,) and the "weights" (B,) of rows.
    """

    def __init__(self, batches: HeldOutBatches, *, rows: RowNumbers = None, **masking: Any):
        chosen = chosen_rows(batches.batch, rows)

        def make(step: int) -> Batch:
            return _masked(batches.make(step), seed=(_VALID, step), rows=chosen, **masking)

        super().__init__(make, len(batches), batches.batch, batches.digest)


def _masked(batch: Batch, **options: Any) -> Batch:
    """The batch with its tokens masked; it keeps its reset and its "segment_ids"."""
    kept = {name: array for name, array in batch.arrays.items() if name == "segment_ids"}
    return Batch(mask_tokens(batch["tokens"], _existing(batch), **options) | kept, batch.reset)


def _existing(batch: Batch) -> Float[np.ndarray, "R T"]:
    """1 where a token of a batch exists."""
    tokens = batch["tokens"]
    if "lengths" in batch.arrays:
        inside = np.arange(tokens.shape[1]) < batch["lengths"][:, None]
        return (inside * batch["weights"][:, None]).astype(np.float32)
    return batch.arrays.get("weights", np.ones(tokens.shape, np.float32))
