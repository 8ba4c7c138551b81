"""Training batches of any kind of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.data.corpus import Corpus
from train.data.hf_stream import StreamedBatches, StreamedText
from train.data.mixture import MixedStreams, Mixture
from train.data.streams import TokenStreams

Text = Corpus | Mixture | StreamedText


def training_batches(
    text: Text, *, batch: int, length: int, seed: int, rows: Sequence[int] | np.ndarray | None = None
) -> TokenStreams | MixedStreams | StreamedBatches:
    """Endless batches of a text; see the classes."""
    if isinstance(text, StreamedText):
        return StreamedBatches(text, batch=batch, length=length, rows=rows)
    kind = MixedStreams if isinstance(text, Mixture) else TokenStreams
    return kind(text, batch=batch, length=length, seed=seed, rows=rows)  # type: ignore[arg-type]
