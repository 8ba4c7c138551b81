"""Slicing and sorting: padding and ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import sliceformer_attention
from tests.support.attention import random_qkv


@pytest.mark.parametrize("order", ["ascending", "descending", "interleaved", "max_exchange"])
def test_padding_stays_behind(order):
    """Whatever the padding holds, a row gives the same as alone, and padded rows give 0."""
    value = random_qkv(9)[2]
    lengths = jnp.asarray([5] + [9] * (value.shape[0] - 1), jnp.int32)
    alone = sliceformer_attention(value[:1, :5], order=order)
    for fill in (jnp.nan, jnp.inf, -jnp.inf):
        out = sliceformer_attention(value.at[0, 5:].set(fill), order=order, key_value_seq_lengths=lengths)
        np.testing.assert_array_equal(out[:1, :5], alone)
        np.testing.assert_array_equal(out[0, 5:], 0)
        np.testing.assert_array_equal(out[1:], sliceformer_attention(value[1:], order=order))


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_equal_values_keep_their_order(order):
    """So gradients go to the tokens in their order."""
    value = jnp.asarray([2.0, 1.0, 2.0, 1.0])[None, :, None, None]
    weight = jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, :, None, None]
    gradient = jax.grad(lambda v: (sliceformer_attention(v, order=order) * weight).sum())(value)
    expected = [3.0, 1.0, 4.0, 2.0] if order == "ascending" else [1.0, 3.0, 2.0, 4.0]
    np.testing.assert_array_equal(gradient[0, :, 0, 0], expected)
