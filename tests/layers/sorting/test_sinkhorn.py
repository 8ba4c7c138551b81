"""The Sinkhorn layer limits the length of sequences."""

import jax
import jax.numpy as jnp
import pytest

from brl_jax.layers import Dimensions, SinkhornConfig

LAYER = SinkhornConfig(block_size=3, max_length=12).layer(Dimensions(16, 4, 2, 4, 16, is_causal=True))


def test_longer_sequences_are_refused():
    message = "max_length must be at least the sequence's length 13, got 12"
    with pytest.raises(ValueError, match=message):
        LAYER.init_cache(1, 13)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(LAYER.init, jax.random.key(0), jnp.ones((1, 13, 16)))
