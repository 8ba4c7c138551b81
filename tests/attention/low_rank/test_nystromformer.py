"""Nystromformer's convolution of the values."""

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax import nystromformer_attention
from tests.support.attention import random_qkv

attend = jax.jit(nystromformer_attention, static_argnames=("num_landmarks", "iterations"))


def test_a_convolution_alone():
    """A kernel with a single 1 shifts the values of its head."""
    query, key, value, _ = random_qkv(9, heads=2)
    one, none = jnp.zeros((2, 3)).at[0, 0].set(1.0), jnp.zeros((2, 3))
    moved = np.asarray(attend(query, key, value, value_kernel=one))
    moved = moved - np.asarray(attend(query, key, value, value_kernel=none))
    np.testing.assert_allclose(moved[:, 1:, 0], value[:, :-1, 0], atol=1e-5)
    np.testing.assert_allclose(moved[:, 0], 0, atol=1e-5)
    np.testing.assert_allclose(moved[:, :, 1], 0, atol=1e-5)
