"""The attention matrix recovered from a function's outputs, against the weights of the tests' references."""

import functools

import jax
import numpy as np
import pytest

from brl_jax.attention.core.implied_weights import implied_weights
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import Dilated
from brl_jax.attention.recurrent.delta import delta_rule
from tests.oracles import attention as oracles


def _inputs(length, heads=2, kv_heads=2, head_dim=4):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, length, heads, head_dim))
    key, value = (jax.random.normal(k, (2, length, kv_heads, head_dim)) for k in keys[1:])
    return query, key, value


@pytest.mark.parametrize("length", [1, 4, 10])
def test_softmax_weights(length):
    query, key, value = _inputs(length)
    attend = functools.partial(full_attention, query, key, is_causal=True)
    weights = implied_weights(attend, value)
    visible = oracles.pairs(length, length, oracles.sliding(length, 0))
    _, expected = oracles.softmax_attention(query, key, value, visible)
    assert weights.shape == (2, 2, length, length)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)


def test_it_is_the_matrix_of_the_function_itself():
    """For patterns, padding and grouped heads, weights @ value is the function's output."""
    query, key, value = _inputs(11, heads=4, kv_heads=2)
    attend = functools.partial(
        local_attention,
        query,
        key,
        pattern=Dilated(3, 0, 2),
        is_causal=True,
        key_value_seq_lengths=np.array([11, 7], np.int32),
    )
    weights = np.asarray(implied_weights(attend, value), np.float64)
    shared = np.repeat(np.asarray(value, np.float64), 2, axis=2)
    out = np.einsum("bnts,bsnh->btnh", weights, shared)
    np.testing.assert_allclose(out, attend(value), rtol=1e-4, atol=1e-5)
    assert (weights[1, :, :, 7:] == 0).all()
    assert (np.triu(weights, 1) == 0).all()
    assert (weights[:, :, np.arange(1, 11), np.arange(10)] == 0).all()  # dilated: skips the direct neighbour


def test_the_delta_rule_implies_signed_weights():
    query, key, value = _inputs(9)
    beta = jax.nn.sigmoid(jax.random.normal(jax.random.key(3), (2, 9, 2)))
    attend = functools.partial(delta_rule, query, key, beta=beta, chunk_size=4)
    weights = np.asarray(implied_weights(attend, value))
    out = np.einsum("bnts,bsnh->btnh", weights, value)
    np.testing.assert_allclose(out, attend(value), rtol=1e-3, atol=1e-5)
    assert weights.min() < 0
