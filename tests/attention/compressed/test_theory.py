"""The theory of BRL-Attention (OpenReview Vpyg3fqXbl) on our functions: proposition 2.4 (appendix E.2), the
modification M1 in proposition 2.7, and appendix E.7."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import compress, propagate
from tests.support.numbers import relative_error


def _random_features(x, directions):
    """Equation 10: exp(-|x|^2 / 2) exp(x w) / sqrt(c)."""
    return np.exp(-np.square(x).sum(-1, keepdims=True) / 2 + x @ directions) / np.sqrt(directions.shape[1])


@pytest.mark.parametrize("score", ["softmax", "relu2"])
def test_compressed_tokens_can_hold_kernelized_attention_exactly(score):
    """Proposition 2.4: the compressed token of equation 31 is a row of c (1 + d) numbers, here its c rows of 1 + d. A
    compressed token for each feature, whose key is the feature's unit vector, gives the numerator and the denominator
    of equation 3: with "relu2" as they are, with softmax over a common factor."""
    rng = np.random.default_rng(0)
    n, d, c = 9, 5, 7
    query, key, value = rng.standard_normal((3, n, d))
    directions = rng.standard_normal((d, c))
    of_query, of_key = (_random_features(x, directions) for x in (query, key))
    expected = of_query @ (of_key.T @ value) / (of_query @ of_key.sum(0))[:, None]
    flat = np.concatenate([of_key.sum(0), (of_key.T @ value).ravel()])
    assert flat.shape == (c * (1 + d),)

    held = np.concatenate([flat[c:].reshape(c, d), flat[:c, None]], axis=1)
    phi = np.log(of_query) if score == "softmax" else np.sqrt(of_query)
    read = propagate(
        *(jnp.asarray(x, jnp.float32)[None, :, None] for x in (phi, np.eye(c), held)),
        strength=1.0,
        scale=1.0,
        score=score,
    )[0, :, 0]
    assert relative_error(read[:, :d] / read[:, d:], expected) < 1e-5


def _sensitivity(seed, m, size, scale, path="both", of="propagated", n=24, d=16):
    """The spectral norm of the Jacobian by x_3, through the compression, of all compressed tokens or of what token 20
    reads from them, for unit-variance tokens and weights of `size` times the usual standard deviation. `path`: through
    the weights of the compression ("score"), through what they weigh ("value"), or both."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((6, d, d)) * size / np.sqrt(d)
    x = rng.standard_normal((n, d))
    tokens = np.random.default_rng(99).standard_normal((256, d))[:m]
    return _norm(of, scale == "m1", path, weights, x, tokens)


def _norm(of, is_m1, path, weights, x, tokens):
    scale = 1 / ((len(tokens) if is_m1 else 1) * np.sqrt(x.shape[1]))
    through = np.array([path in (kind, "both") for kind in ("score", "value")])
    return _traced_norm(of, through, *(jnp.asarray(a, jnp.float32) for a in (scale, weights, x, tokens)))


@functools.partial(jax.jit, static_argnums=0)
def _traced_norm(of, through, scale, weights, x, tokens):
    to_query, to_key, to_value, to_read, to_offer, to_hold = weights

    def heads(*arrays):
        return (a[None, :, None] for a in arrays)

    def output(own):
        scored, weighed = (x.at[3].set(jnp.where(along, own, x[3])) for along in through)
        query, key, value = heads(tokens @ to_query, scored @ to_key, weighed @ to_value)
        compressed = compress(scale * query, key, key, value, gamma=0.0, scale=1.0)[0, :, 0]
        if of == "compressed":
            return compressed.ravel()
        read = heads(x[20:21] @ to_read, compressed @ to_offer, compressed @ to_hold)
        return propagate(*read, strength=1.0)[0, 0, 0]

    return jnp.linalg.norm(jax.jacfwd(output)(x[3]), 2)


def test_m1_bounds_the_path_through_the_weights_alone():
    """Proposition 2.7 bounds the gradient by O(m) without M1, and by O(1) with it. Medians over 20 networks.

    The path through the compression's weights, the only one in the proof, does grow with m without M1, by far more at
    three times the usual weights, and falls with M1. What a token reads does not grow at the usual weights, with M1 or
    without: most of it comes through the values.
    """

    def growth(size, scale, path="both", of="propagated"):
        few, many = (
            np.median([_sensitivity(seed, m, size, scale, path, of) for seed in range(20)]) for m in (4, 64)
        )
        return many / few

    assert 3 < growth(1, "rsqrt", "score", "compressed") < growth(3, "rsqrt", "score", "compressed")
    assert growth(1, "m1", "score", "compressed") < 0.5
    assert growth(3, "m1", "score", "compressed") < 0.5
    assert 0.7 < growth(1, "rsqrt") < 1.3
    assert 0.7 < growth(1, "m1") < 1.3
    assert 0.7 < growth(1, "m1", "value") < 1.3
    assert growth(1, "m1", "score") < 1 / 30


def test_the_lower_bound_of_appendix_e7_is_not_one():
    """Equation 68 has m s^6 / d for unit tokens and weights whose least singular value is s. With identities for
    weights (s = 1), 64 compressed tokens and d = 4 that is 16, where the gradient is below 1, but not 0."""
    m, d = 64, 4
    x, tokens = (
        a / np.linalg.norm(a, axis=1, keepdims=True)
        for a in np.random.default_rng(0).standard_normal((2, m, d))
    )
    weights = np.broadcast_to(np.eye(d), (6, d, d))
    for is_m1 in (True, False):
        found = float(_norm("propagated", is_m1, "both", weights, x, tokens))
        assert 1e-3 < found < 1
        assert m / d == 16
