"""The mask of local attention, against `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import ALiBi, alibi_slopes, local_attention
from tests.attention.calls import HEADS, LENGTH, qkv


@pytest.mark.parametrize("shape", [(2, HEADS, LENGTH, LENGTH), (LENGTH,)])
def test_bias_and_mask_by_position(shape):
    query, key, value = qkv(2)
    random = np.random.default_rng(0)
    mask = jnp.asarray(random.random(shape) < 0.7).reshape((1,) * (4 - len(shape)) + shape)
    mask = (
        mask | jnp.eye(LENGTH, dtype=bool)[None, None]
    )  # for rows without a key, `jax.nn` gives the mean of all values
    bias = jnp.asarray(random.normal(size=(1, HEADS, LENGTH, LENGTH)), jnp.float32)
    arrays = (query, key, value, bias)

    def gradients(attend):
        def loss(*arrays):
            out = attend(*arrays, mask, local_window_size=(3, 1))
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)

    for got, expected in zip(
        jax.tree.leaves(gradients(local_attention)),
        jax.tree.leaves(gradients(jax.nn.dot_product_attention)),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_with_a_position_bias_is_refused():
    mask = jnp.ones((LENGTH, LENGTH), bool)
    with pytest.raises(ValueError, match="mask must be None with a ALiBi"):
        local_attention(*qkv(1), ALiBi(alibi_slopes(HEADS)), mask, local_window_size=2)
