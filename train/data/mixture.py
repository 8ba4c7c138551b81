"""Several texts as one, each with a weight: --data mix:0.7*TEXT,0.3*TEXT."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import grain
import numpy as np

from train.data.corpus import Corpus
from train.data.repeated import RepeatedBatches, RowNumbers, chosen_rows
from train.data.streams import text_identity
from train.engine.batch import Batch
from train.engine.errors import UserError
from train.engine.storage import digest

# A row reads this many steps from one text before it goes to another one, so that what it remembers is mostly its past.
SEGMENT_STEPS = 16
# Held-out texts alternate after this many tokens, so that the beginning is of all of them.
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Corpora and their weights, which add up to 1."""

    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...]

    @property
    def tokens(self) -> range:
        """As long as all corpora together; used for the length alone."""
        return range(sum(len(corpus.tokens) for corpus in self.corpora))

    @property
    def is_weighted(self) -> bool:
        """Whether some tokens count more in the loss than others."""
        return any(corpus.is_weighted for corpus in self.corpora)

    @property
    def starts(self) -> range:
        """As long as all corpora's documents; used for the length alone."""
        return range(sum(len(corpus.starts) for corpus in self.corpora))


_WEIGHT = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def parse_mixture(spec: str) -> dict[str, float]:
    """The texts of "0.7*A,0.3*B" and their weights, divided by the sum. A comma separates texts where a number and an
    asterisk follow it."""
    parts = [part for part in re.split(rf",(?=\s*-?{_WEIGHT}\*)", spec) if part.strip()]
    found: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(rf"\s*({_WEIGHT})\*(\S.*)", part)
        if match is None or float(match[1]) <= 0 or match[2].startswith("mix:"):
            raise UserError(
                f"--data mix: expected WEIGHT*TEXT,WEIGHT*TEXT with weights above 0, got {part!r}"
            )
        if match[2] in found:
            raise UserError(f"--data mix: {match[2]} is named twice")
        found[match[2]] = float(match[1])
    if not found:
        raise UserError(f"--data mix: expected WEIGHT*TEXT,WEIGHT*TEXT, got {spec!r}")
    total = sum(found.values())
    return {name: weight / total for name, weight in found.items()}


class MixedStreams(RepeatedBatches):
    """Endless training batches whose rows come from the corpora of a mixture, by weight.

    Rows read segments of `SEGMENT_STEPS` steps. Grain's mixture decides from which corpus segment number k * batch + b,
    the k-th of row b, comes: in every prefix the shares follow the weights, as closely as whole numbers allow. The
    segments of a corpus are shuffled in each pass over it. Batches are as in `train.data.streams.TokenStreams`.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        batch: int,
        length: int,
        seed: int = 0,
        rows: RowNumbers = None,
        segments: bool = False,
    ):
        chosen = chosen_rows(batch, rows)
        span = SEGMENT_STEPS * length
        for corpus in mixture.corpora:
            if len(corpus.tokens) < span + 1:
                raise UserError(
                    f"--data mix: a text has {len(corpus.tokens)} tokens, too few for a segment: {SEGMENT_STEPS} times "
                    f"--length {length}, and the token after, take {span + 1}"
                )
        drawn = grain.MapDataset.mix(
            [
                grain.MapDataset.range(len(corpus.tokens) // span)
                .seed(seed + which)
                .shuffle()
                .map(lambda place, which=which: (which, place))
                .repeat()
                for which, corpus in enumerate(mixture.corpora)
            ],
            mixture.weights,
        )
        window = np.arange(length + 1)

        def make(index: int, step: int) -> Batch:
            segment, within = divmod(index, SEGMENT_STEPS)
            places = [drawn[segment * batch + number] for number in chosen.tolist()]
            rows = [(mixture.corpora[which], place * span + within * length) for which, place in places]
            taken = [corpus.tokens.take(start + window, mode="wrap") for corpus, start in rows]
            tokens = np.stack(taken).astype(np.int32)
            arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
            if segments:
                ids = [corpus.segment_ids(np.array([start]), length) for corpus, start in rows]
                arrays["segment_ids"] = np.concatenate(ids)
            if mixture.is_weighted:
                arrays["weights"] = np.stack([c.weights_at(start + window[1:]) for c, start in rows])
            return Batch(arrays, reset=np.bool_(index == 0))

        steps = max(1, len(mixture.tokens) // (batch * length))
        hashed = digest([corpus.digest for corpus in mixture.corpora], mixture.weights)
        sizes = {"batch": batch, "length": length, "seed": seed}
        super().__init__(make, steps, text_identity(mixture, hashed, segments, **sizes))


def joined(corpora: Sequence[Corpus], weights: Sequence[float]) -> Corpus:
    """Held-out corpora as one, with shares by weight: blocks of theirs take turns until one is used up."""
    total = int(min(len(corpus.tokens) / weight for corpus, weight in zip(corpora, weights)))
    sizes = [min(max(int(total * weight), 1), len(c.tokens)) for c, weight in zip(corpora, weights)]
    blocks = sorted(
        (start / size, which, start, min(start + _BLOCK, size))
        for which, size in enumerate(sizes)
        for start in range(0, size, _BLOCK)
    )
    tokens, extra, starts, loss_weights, count = [], [], [], [], 0
    before = None
    for _, which, start, stop in blocks:
        corpus = corpora[which]
        tokens.append(np.asarray(corpus.tokens[start:stop]))
        first, last = np.searchsorted(corpus.extra[:, 0], (start, stop))
        extra.append(corpus.extra[first:last] + np.array([[count - start, 0]]))
        if before != (which, start):  # what follows is of another document
            starts.append(np.array([count]))
        first, last = np.searchsorted(corpus.starts, (start, stop))
        starts.append(corpus.starts[first:last] + (count - start))
        first, last = np.searchsorted(corpus.weights[:, 0], (start, stop - 1), side="right")
        loss_weights.append(np.array([[count, corpus.weights_at(np.array(start))]]))
        loss_weights.append(corpus.weights[first:last] + np.array([[count - start, 0]]))
        count += stop - start
        before = which, stop
    return Corpus(
        np.concatenate(tokens),
        corpora[0].token_bytes,
        np.concatenate(extra),
        digest([corpus.digest for corpus in corpora], weights),
        np.unique(np.concatenate(starts)),
        np.concatenate(loss_weights) if any(corpus.is_weighted for corpus in corpora) else np.zeros((0, 2)),
    )
