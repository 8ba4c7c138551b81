"""Labelled examples for batches, and the lengths that batches pad them to."""

import numpy as np

from train.data.examples import Examples

BUCKETS = (4, 8, 16)


def examples(count=23, parts=1, longest=16, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, (count, parts)).astype(np.int32)
    tokens = rng.integers(1, 256, lengths.sum()).astype(np.uint8)
    labels = np.arange(count, dtype=np.int32)  # the label identifies the example of a row
    return Examples(tokens, lengths, labels, truncated=0, digest=f"{count}-{parts}-{seed}")
