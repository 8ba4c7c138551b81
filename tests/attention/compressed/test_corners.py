"""Biases of minus infinity, at lengths that are read whole and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import compress, propagate
from tests.attention.compressed.cases import arrays


@pytest.mark.parametrize("lowest", [-jnp.inf, jnp.finfo(jnp.float32).min])
@pytest.mark.parametrize("length", [21, 5000])
def test_rows_whose_bias_is_minus_infinity_give_zero(length, lowest):
    """All paths agree, forward and backward; other rows only lose the keys that their bias hides."""
    query, key, value, gamma = (
        jnp.asarray(x, jnp.float32)
        for x in arrays(5, (1, 3, 2, 8), (1, length, 2, 8), (1, length, 2, 8), (2,))
    )
    bias = jnp.zeros((1, 2, 3, length)).at[:, :, 1].set(lowest).at[:, :, 2, :7].set(lowest)

    def compressed(query, key, value, bias):
        return compress(query, key, key, value, gamma=gamma, bias=bias, implementation="xla")

    def propagated(query, key, value, bias):
        return propagate(
            key, query, value[:, :3], strength=0.5, bias=bias.swapaxes(2, 3), implementation="xla"
        )

    out = compressed(query, key, value, bias)
    assert not np.asarray(out[:, 1]).any()
    assert np.asarray(out[:, 2]).any()
    every = bias.at[:, :, :, 4].set(lowest)
    assert not np.asarray(propagated(query, key, value, every)[:, 4]).any()
    for function, b in ((compressed, bias), (propagated, every)):
        grads = jax.grad(lambda *x, f=function: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2, 3))(
            query, key, value, b
        )
        assert all(np.isfinite(g).all() for g in grads)
