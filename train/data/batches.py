"""Training batches of any kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        return StreamedBatches(text, batch=batch, length=length, seed=seed, rows=rows)
    return batches_by_number(text, batch=batch, length=length, seed=seed, rows=rows)


def batches_by_number(text: Corpus | Mixture, **options: Any) -> TokenStreams | MixedStreams:
    """Endless batches of a text whose tokens are on disk; options as for the classes."""
    if isinstance(text, Mixture):
        return MixedStreams(text, **options)
    return TokenStreams(text, **options)
