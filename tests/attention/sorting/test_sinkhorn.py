"""Sparse Sinkhorn attention: its weights, its noise, and what its state refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import init_sinkhorn_state
from brl_jax import sinkhorn_attention as eager_attention
from brl_jax.attention.sorting.sinkhorn import balanced
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


def sinkhorn_attention(*arrays, lengths=None, rng=None, **options):
    def call(arrays, lengths, rng):
        return eager_attention(*arrays, key_value_seq_lengths=lengths, rng=rng, **options)

    return jax.jit(call)(arrays, lengths, rng)


def random_logits(arrays, count, seed=0):
    """(B, C, K, C)"""
    shape = arrays[0].shape[0], count, arrays[1].shape[2], count
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_weights_are_doubly_stochastic():
    exists = jnp.asarray([[True] * 6, [True] * 4 + [False] * 2])
    weights = np.asarray(balanced(random_logits(random_qkv(3), 6), exists, 60, 0.75, False, None))
    present = np.broadcast_to(exists[:, None], weights.shape[:3])
    np.testing.assert_allclose(weights.sum(2), present, atol=1e-5)
    np.testing.assert_allclose(weights.sum(3), present, atol=1e-5)


def test_causal_weights_equal_every_prefixs():
    logits = random_logits(random_qkv(3), 6)
    weights = np.asarray(balanced(logits, None, 4, 0.75, True, None))
    np.testing.assert_array_equal(np.triu(weights), 0)
    prefix = balanced(logits[:, :4, :, :4], None, 4, 0.75, True, None)
    np.testing.assert_allclose(prefix, weights[:, :, :4, :4], rtol=1e-5)


def test_noise_is_drawn_from_the_key():
    arrays = random_qkv(12, heads=2)[:3]
    logits = random_logits(arrays, 3)
    first, again, other, none = (
        sinkhorn_attention(*arrays, logits, block_size=4, rng=rng)
        for rng in (jax.random.key(0), jax.random.key(0), jax.random.key(1), None)
    )
    np.testing.assert_array_equal(first, again)
    assert relative_error(other, first) > 1e-3
    assert relative_error(none, first) > 1e-3


def test_a_state_refuses_what_does_not_fit():
    query, key, value = random_qkv(6)[:3]
    logits = random_logits((query, key), 2)
    state = init_sinkhorn_state(key.shape[0], key.shape[2], key.shape[3], length=5, block_size=3)
    options = {"block_size": 3, "is_causal": True, "state": state}
    assert state.keys.shape[2] == 6
    for sort_logits in (None, random_logits((query, key), 3), logits[..., :1]):
        with pytest.raises(ValueError, match="sort_logits must be a floating-point array of shape"):
            eager_attention(query, key, value, sort_logits, **options)
    for changes, message in (
        ({"block_size": 4}, r"state.keys must be float32 of shape \(2, 2, 8, 8\), got"),
        ({"rng": jax.random.key(0)}, "rng must be None with a state"),
    ):
        with pytest.raises(ValueError, match=message):
            eager_attention(query, key, value, logits, **options | changes)
    _, full = eager_attention(query, key, value, logits, **options, return_state=True)
    with pytest.raises(ValueError, match="has room for 6 tokens, got 1 after 6"):
        eager_attention(query[:, :1], key[:, :1], value[:, :1], logits, **options | {"state": full})
