"""The Sinkhorn layer: noise in training alone, and a longest sequence."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import Dimensions, SinkhornConfig

LAYER = SinkhornConfig(block_size=3, max_length=12).layer(Dimensions(16, 4, 2, 4, 16, is_causal=True))


def test_noise_in_training_alone():
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    variables = nn.unbox(jax.jit(LAYER.init)(jax.random.key(1), x))

    def run(deterministic, seed):
        keys = {"sample": jax.random.key(seed)}
        return programs[deterministic](variables, x, keys)

    programs = [
        jax.jit(lambda v, x, keys, d=d: LAYER.apply(v, x, deterministic=d, rngs=keys)[0])
        for d in (False, True)
    ]
    np.testing.assert_array_equal(run(True, 2), run(True, 3))
    np.testing.assert_array_equal(run(False, 2), run(False, 2))
    assert np.abs(run(False, 2) - run(True, 2)).max() > 1e-4
    assert np.abs(run(False, 2) - run(False, 3)).max() > 1e-4


def test_longer_sequences_are_refused():
    message = "max_length must be at least the sequence's length 13, got 12"
    with pytest.raises(ValueError, match=message):
        LAYER.init_cache(1, 13)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(LAYER.init, jax.random.key(0), jnp.ones((1, 13, 16)))
