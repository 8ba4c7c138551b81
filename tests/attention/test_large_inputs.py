"""Inputs so large that float32 rounds their scores by more than exp tolerates, weights beyond float16's range, and
weights whose square float32 rounds to 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax as bj

# The scale for 12 features, 1 / sqrt(12), rounds the scores; a power of two would not.
LENGTH, HEADS, HEAD_DIM = 13, 2, 12


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = (normal(i, 2, LENGTH, HEADS, HEAD_DIM) for i in range(3))
FEW = normal(3, 8, LENGTH)
CALLS = {
    "full": bj.full_attention,
    "full, causal": lambda q, k, v: bj.full_attention(q, k, v, is_causal=True),
    "local": lambda q, k, v: bj.local_attention(q, k, v, local_window_size=4),
    "diag": lambda q, k, v: bj.diag_attention(q, k, v, block_size=8),
    "hopfield": lambda q, k, v: bj.hopfield_attention(q, k, v, steps=2),
    "nystromformer": lambda q, k, v: bj.nystromformer_attention(q, k, v, num_landmarks=8),
    "linformer": lambda q, k, v: bj.linformer_attention(q, k, v, key_projection=FEW, value_projection=FEW),
    "compress": lambda q, k, v: bj.compress(q[:, :8], k, k[::-1], v, gamma=0.5),
    "propagate": lambda q, k, v: bj.propagate(q, k[:, :8], v[:, :8], strength=0.5),
    "informer": lambda q, k, v: bj.informer_attention(q, k, v, rng=jax.random.key(0)),
    "luna": lambda q, k, v: bj.luna_attention(q, k, v, q[0, :8]),
    "bsbr": lambda q, k, v: bj.bsbr_attention(q, k, v, q, k, strength=0.0, chunk_size=4),
}


@pytest.mark.parametrize("name", CALLS)
def test_softmax_of_large_scores_is_finite_under_jit(name):
    out = jax.jit(CALLS[name])(1e6 * QUERY, 1e6 * KEY, VALUE)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", ["compress", "full", "diag"])
def test_gradients_of_large_scores_are_finite_under_jit(name):
    def loss(*arrays):
        return jnp.square(CALLS[name](*arrays)).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(1e6 * QUERY, 1e6 * KEY, VALUE)
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_gaussian_weights_keep_their_digits(size):
    """Half of the keys are within 1e-3 of a query, relative to the size of both."""
    key = size * KEY
    query = key + jnp.where(jnp.arange(LENGTH) % 2 == 0, 1.0, 0.3)[None, :, None, None] * QUERY
    exact_query, exact_key, value = (np.asarray(x, np.float64) for x in (query, key, VALUE))
    differences = exact_query[:, :, None] - exact_key[:, None]
    weights = np.exp(-np.square(differences).sum(-1) / (2 * np.sqrt(HEAD_DIM)))
    expected = np.einsum("btsn,bsnv->btnv", weights, value)
    out = jax.jit(bj.kernelized_attention)(query, key, VALUE)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_gaussian_weights_do_not_exceed_one():
    large = 1e4 * QUERY
    ones = jnp.ones_like(VALUE)
    assert (np.asarray(bj.kernelized_attention(large, large, ones)) == 1).all()
    samples = bj.skyformer_samples(jax.random.key(0), 4)
    assert np.isfinite(bj.skyformer_attention(large, large, ones, samples=samples)).all()


#: name -> (the call, the size of queries and keys at which its weights exceed 65,504)
BEYOND = {
    "diag": (lambda q, k, v: bj.diag_attention(q, k, v, score="relu", scale=1.0), 320.0),
    "propagate": (lambda q, k, v: bj.propagate(q, k, v, strength=1.0, score="relu2", scale=1.0), 10.3),
    "compress": (lambda q, k, v: bj.compress(q, k, k, v, gamma=0.0, score="relu2", scale=1.0), 10.3),
}


@pytest.mark.parametrize("name", BEYOND)
def test_weights_beyond_float16(name):
    call, size = BEYOND[name]
    rows = jnp.full((1, 2, 1, 4), size, jnp.float16)
    value = jnp.full((1, 2, 1, 4), 1e-4, jnp.float16)
    exact = call(*(x.astype(jnp.float32) for x in (rows, rows, value)))
    np.testing.assert_allclose(call(rows, rows, value), exact, rtol=2e-3)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_whose_square_is_zero(is_causal):
    """Outputs do not depend on the size of features that the sum of the weights divides."""

    @jax.jit
    def pulled(query, key):
        options = {"feature_map": "relu", "is_causal": is_causal}
        out, pull = jax.vjp(lambda *qk: bj.linear_attention(*qk, VALUE, **options), query, key)
        return out, *pull(VALUE)

    small = np.float32(1e-11)
    expected = pulled(QUERY, KEY)
    found = pulled(small * QUERY, small * KEY)
    for x, y in zip((found[0], small * found[1], small * found[2]), expected):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
