"""Batches whose rows continue where the previous batch's rows stopped, so that carried memory is the real past."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int

from train.data.corpus import Corpus
from train.data.repeated import HeldOutText, RepeatedBatches, RowNumbers, chosen_rows
from train.engine.batch import Batch
from train.engine.errors import UserError


def text_identity(text: Any, digest: str, segments: bool, **sizes: int) -> dict[str, Any]:
    """What batches of a corpus or a mixture depend on."""
    documents = {"documents": len(text.starts)} if segments else {}
    return {**sizes, "tokens": len(text.tokens), "digest": digest, **documents}


class TokenStreams(RepeatedBatches):
    """Endless training batches: `batch` rows, each reading its own part of the text.

    A pass takes steps_per_pass = N // (batch * length) steps. In a pass that starts at offset o, row b of
    step s holds tokens [o + b R + s T, o + b R + s T + T), R = steps_per_pass * T, positions wrapping around at
    the end of the text, and as targets the token after each. The offset of each pass is drawn from the
    seed and the pass's number alone.

    A batch is {"tokens": (B, T) int32, "targets": (B, T) int32}; its reset is True on the
    first batch of a pass, where the rows jump and memory must be cleared.
    With `segments` a batch has "segment_ids": (B, T) int32, which document of its row each token is of, from 0 on; of a
    corpus with weights it has the targets' "weights": (B, T) float32."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch: int,
        length: int,
        seed: int = 0,
        rows: RowNumbers = None,
        segments: bool = False,
    ):
        chosen = chosen_rows(batch, rows)
        size = len(corpus.tokens)
        if size < batch * length + 1:
            raise UserError(
                f"--data: the text has {size} tokens, too few for one batch: "
                f"--batch {batch} times --length {length}, and the token after, take {batch * length + 1}"
            )
        tokens, steps = corpus.tokens, size // (batch * length)
        row_starts = chosen[:, None] * (steps * length) + np.arange(length + 1)

        def make(index: int, step: int) -> Batch:
            offset = np.random.default_rng([seed, index // steps]).integers(size)
            at = row_starts + (offset + step * length)
            window = tokens.take(at, mode="wrap").astype(np.int32)
            batch = Batch({"tokens": window[:, :-1], "targets": window[:, 1:]}, reset=np.bool_(step == 0))
            if segments:
                batch = batch.with_arrays(segment_ids=corpus.segment_ids(at[:, 0] % size, length))
            if corpus.is_weighted:
                batch = batch.with_arrays(weights=corpus.weights_at(at[:, 1:]))
            return batch

        sizes = {"batch": batch, "length": length, "seed": seed}
        super().__init__(make, steps, text_identity(corpus, corpus.digest, segments, **sizes))


class EvalStream(HeldOutText):
    """One pass over a text: every token but the first is a target once, unless the corpus gives it the weight 0.

    The N - 1 targets are cut in `batch` rows of R = ceil((N - 1) / batch), the last ones shorter; step s of
    row b has targets [b R + s T, b R + s T + T) of its row. A batch is {"tokens": (B, T) int32, "targets":
    (B, T) int32, "weights": (B, T) float32}, reset in the first one; weights are 0 on the padding of the last batch,
    where tokens and targets are 0, and on targets whose weight in the corpus is 0, and 1 elsewhere. Iterating again
    starts from the beginning. With `limit` the text is its first tokens; with `segments` a batch has "segment_ids" too,
    as in `TokenStreams`."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        batch: int,
        length: int,
        limit: int | None = None,
        rows: RowNumbers = None,
        segments: bool = False,
    ):
        chosen = chosen_rows(batch, rows)
        tokens: Int[np.ndarray, " N"] = corpus.tokens[:limit]
        if len(tokens) < 2:
            raise UserError(f"--data: the held-out text must have at least 2 tokens, got {len(tokens)}")
        places, targets = np.arange(length), len(tokens) - 1
        row = -(-targets // batch)

        def make(step: int) -> Batch:
            within = places + step * length
            at = chosen[:, None] * row + within
            inside = (within < row) & (at < targets)
            at = np.where(inside, at, 0)
            counted = inside & (corpus.weights_at(at + 1) > 0) if corpus.is_weighted else inside
            arrays = {
                "tokens": np.where(inside, tokens[at], 0).astype(np.int32),
                "targets": np.where(inside, tokens[at + 1], 0).astype(np.int32),
                "weights": counted.astype(np.float32),
            }
            if segments:
                arrays["segment_ids"] = corpus.segment_ids(at[:, 0], length)
            return Batch(arrays, reset=np.bool_(step == 0))

        super().__init__(make, -(-row // length), corpus, batch, [(1, len(tokens))])
