"""Batches: each example once per pass, padded to the bucket of its length."""

import numpy as np
import pytest

from tests.support.examples import BUCKETS, examples
from train.data.bucketed import EvalBatches, TrainBatches, default_buckets
from train.engine.errors import UserError


def check_rows(batch, data):
    """Each weighted row is its example, followed by zeros."""
    for tokens, lengths, target, weight in zip(
        *(batch[n] for n in ("tokens", "lengths", "targets", "weights"))
    ):
        if weight:
            for row, length, sequence in zip(np.atleast_2d(tokens), np.atleast_1d(lengths), data[target]):
                assert length == len(sequence)
                np.testing.assert_array_equal(row[:length], sequence)
                assert not row[length:].any()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_pass_has_every_example_once_but_a_remainder(parts):
    data = examples(parts=parts)
    stream = TrainBatches(data, batch=4, buckets=BUCKETS, seed=3)
    assert stream.steps_per_pass == 5
    passes = [[next(stream) for _ in range(5)] for _ in range(2)]
    orders = [np.concatenate([batch["targets"] for batch in batches]) for batches in passes]
    for batches, order in zip(passes, orders):
        assert len(set(order.tolist())) == 20
        widths = []
        for batch in batches:
            check_rows(batch, data)
            width = batch["tokens"].shape[-1]
            widths.append(width)
            # The bucket is the smallest that fits the longest row.
            assert width == min(b for b in BUCKETS if b >= batch["lengths"].max())
            assert batch["tokens"].shape[:-1] == ((4, 2) if parts == 2 else (4,))
        assert len(set(widths)) > 1
    assert orders[0].tolist() != orders[1].tolist()
    stream.close()


def test_evaluation_has_every_example_once():
    data = examples()
    stream = EvalBatches(data, batch=4, buckets=BUCKETS)
    for _ in range(2):
        batches = list(stream)
        assert len(batches) == len(stream)
        seen = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
        assert sorted(seen) == list(range(23))
        for batch in batches:
            check_rows(batch, data)
            assert batch["lengths"].min() >= 1
    limited = EvalBatches(data, batch=4, buckets=BUCKETS, limit=6)
    assert sum(batch["weights"].sum() for batch in limited) == 6


def test_buckets():
    assert default_buckets(2000) == (250, 500, 1000, 2000)
    assert default_buckets(3) == (1, 2, 3)
    with pytest.raises(UserError, match="--buckets: the longest must hold 16 tokens, got 8"):
        TrainBatches(examples(), batch=4, buckets=(4, 8))
    with pytest.raises(UserError, match="--batch: expected at most the 3 training examples, got 4"):
        TrainBatches(examples(3), batch=4, buckets=BUCKETS)
