"""The Reformer layer draws its directions anew in training alone."""

import flax.linen as nn
import jax
import numpy as np

from brl_jax.layers import Dimensions, ReformerConfig

LAYER = ReformerConfig(num_rounds=1, num_buckets=8, chunk_size=2).layer(
    Dimensions(16, 4, 2, 4, 16, is_causal=True)
)


def test_directions_of_training():
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    variables = nn.unbox(jax.jit(LAYER.init)(jax.random.key(1), x))
    training, evaluation = (
        jax.jit(lambda v, x, key, d=d: LAYER.apply(v, x, deterministic=d, rngs={"sample": key})[0])
        for d in (False, True)
    )
    first, again, other = (training(variables, x, jax.random.key(seed)) for seed in (2, 2, 3))
    np.testing.assert_array_equal(first, again)
    assert np.abs(other - first).max() > 1e-3
    np.testing.assert_array_equal(
        evaluation(variables, x, jax.random.key(2)), evaluation(variables, x, jax.random.key(3))
    )
