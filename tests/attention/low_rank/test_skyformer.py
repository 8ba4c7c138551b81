"""How Skyformer draws its samples."""

import jax
import numpy as np

from brl_jax import skyformer_samples


def test_places_are_uniform():
    places = np.asarray(skyformer_samples(jax.random.key(0), 2000))
    assert places.min() >= 0
    assert places.max() < 1
    assert abs(places.mean() - 0.5) < 0.03
    with jax.enable_x64(True):
        np.testing.assert_array_equal(skyformer_samples(jax.random.key(0), 2000), places)
