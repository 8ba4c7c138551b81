"""Values wider than the keys, and biases of minus infinity, at lengths that are read in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import compress, propagate
from tests.attention.compressed.cases import arrays
from tests.oracles.compressed import compress as oracle_compress
from tests.support.attention import check


@pytest.mark.parametrize("length", [512, 513, 1100])
def test_values_of_another_width_propagate_at_any_length(length):
    """Loops over blocks of queries use the width of the values."""
    operands = arrays(3, (1, length, 2, 8), (1, 3, 2, 8), (1, 3, 2, 5), (2,))

    def function(query, key, value, strength):
        return propagate(query, key, value, strength=strength, implementation="xla")

    def oracle(query, key, value, strength):
        return strength[:, None] * oracle_compress(query, key, None, value, None, 8**-0.5, "softmax")

    check(function, oracle, operands)


@pytest.mark.parametrize("length", [21, 5000])
def test_values_of_another_width_compress_at_any_length(length):
    operands = arrays(4, (1, 3, 2, 8), (1, length, 2, 8), (1, length, 2, 8), (1, length, 2, 5), (2,))

    def function(*operands):
        return compress(*operands[:4], gamma=operands[4], implementation="xla")

    check(function, lambda *xs: oracle_compress(*xs, 8**-0.5 / 3, "softmax"), operands)


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
