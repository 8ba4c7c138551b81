"""Biases that depend on distances: T5's buckets against their definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import t5_bucket


def test_t5_buckets_begin_where_the_paper_has_them():
    """32 buckets up to distance 128: 16 with one distance each, then 16 whose width grows by 8^(1/16)."""
    starts = [*range(16), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    starts.insert(16, 16)
    distances = np.arange(300)
    expected = np.searchsorted(starts, distances, side="right") - 1
    np.testing.assert_array_equal(t5_bucket(jnp.asarray(-distances), 32, 128, False), expected)
    # Keys after the query share the bucket of distance 0.
    np.testing.assert_array_equal(t5_bucket(jnp.asarray(distances), 32, 128, False), 0 * distances)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 30), (12, 50), (64, 128)])
def test_t5_buckets_of_both_sides(num_buckets, max_distance):
    half = num_buckets // 2
    exact = half // 2
    starts = [exact * (max_distance / exact) ** (k / (half - exact)) for k in range(half - exact)]
    starts = [*range(exact), *starts]
    relative = np.arange(-200, 201)
    expected = np.searchsorted(starts, np.abs(relative), side="right") - 1 + half * (relative > 0)
    np.testing.assert_array_equal(t5_bucket(jnp.asarray(relative), num_buckets, max_distance, True), expected)
