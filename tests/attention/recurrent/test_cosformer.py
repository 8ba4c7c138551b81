"""cosFormer's `max_length` as an array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax import cosformer_attention


def test_an_array_of_the_longest_length():
    """A decoding cache keeps it so. Also with enough tokens for a kernel, and with gradients."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 600, 2, 8)) for i in range(3))

    def loss(longest, *arrays):
        return jnp.sum(cosformer_attention(*arrays, max_length=longest, is_causal=True) ** 2)

    gradients = jax.grad(loss, argnums=(1, 2, 3))
    given = jax.jit(gradients)(jnp.int32(700), q, k, v)
    known = jax.jit(functools.partial(gradients, 700))(q, k, v)
    for one, other in zip(given, known):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
