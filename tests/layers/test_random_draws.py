"""Layers with random draws use the given key, and only in training."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from brl_jax.layers import PerformerConfig, ReformerConfig, SinkhornConfig, SkyformerConfig
from tests.laws.cases import dimensions

# A configuration, whether it is causal, and the name of its keys.
CASES = {
    "reformer": (ReformerConfig(num_rounds=1, num_buckets=8, chunk_size=2), True, "sample"),
    "sinkhorn": (SinkhornConfig(block_size=3, max_length=12), True, "sample"),
    "skyformer": (SkyformerConfig(num_samples=4), False, "sample"),
    "performer": (PerformerConfig(chunk_size=4), True, "projection"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_key_decides_in_training_alone(name):
    config, is_causal, key = CASES[name]
    layer = config.layer(dimensions(is_causal))
    x = np.random.default_rng(0).standard_normal((2, 12, 16)).astype(np.float32)
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))

    def run(deterministic, seed):
        return programs[deterministic](variables, x, {key: jax.random.key(seed)})

    programs = [
        jax.jit(lambda v, x, keys, d=d: layer.apply(v, x, deterministic=d, rngs=keys)[0])
        for d in (False, True)
    ]
    np.testing.assert_array_equal(run(False, 2), run(False, 2))
    assert np.abs(run(False, 3) - run(False, 2)).max() > 1e-4
    if name != "performer":  # a key in evaluation sets Performer's features
        np.testing.assert_array_equal(run(True, 2), run(True, 3))
        assert np.abs(run(False, 2) - run(True, 2)).max() > 1e-4
