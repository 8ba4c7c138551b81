"""One landmark per token, the convolution alone, and what the function refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import full_attention, nystromformer_attention
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv

attend = jax.jit(nystromformer_attention, static_argnames=("num_landmarks", "iterations"))


@pytest.mark.slow
def test_a_landmark_for_each_token_is_full_attention():
    """The weights are far from singular here, so the iteration converges."""
    query, key, value, _ = random_qkv(5, heads=2)
    query = key = 6 * jnp.eye(5, key.shape[3])[None, :, None] + 0.1 * key
    expected = full_attention(query, key, value)
    assert relative_error(attend(query, key, value, iterations=12), expected) < 1e-4
    assert relative_error(attend(query, key, value, num_landmarks=2), expected) > 1e-2


def test_a_convolution_alone():
    """A kernel with a single 1 shifts the values of its head."""
    query, key, value, _ = random_qkv(9, heads=2)
    one, none = jnp.zeros((2, 3)).at[0, 0].set(1.0), jnp.zeros((2, 3))
    moved = np.asarray(attend(query, key, value, value_kernel=one))
    moved = moved - np.asarray(attend(query, key, value, value_kernel=none))
    np.testing.assert_allclose(moved[:, 1:, 0], value[:, :-1, 0], atol=1e-5)
    np.testing.assert_allclose(moved[:, 0], 0, atol=1e-5)
    np.testing.assert_allclose(moved[:, :, 1], 0, atol=1e-5)
