"""TransNormer's theory, checked on our functions (arXiv 2210.10340, section 3.1, appendix C).

With one feature per key, one can choose query features that make the scores s_ij = phi(q_i) . phi(k_j) equal any matrix
S. The functions then depend on S alone, and have a gradient with respect to each score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import linear_attention

LENGTH = 6
SIZES = [10.0**-k for k in range(6)]  # of the features


def _inverse_feature_map(kind, features):
    """Inverts phi: x with phi(x) = features, for positive features."""
    if kind == "elu+1":
        return jnp.where(features > 1, features - 1, jnp.log(jnp.minimum(features, 1.0)))
    return features  # elu


def _problem(seed=0):
    """Keys' features A, scores S, values and the gradient of the loss with respect to the outputs, each (n, n)."""
    rng = np.random.default_rng(seed)
    key_features = np.eye(LENGTH) + 0.5
    query_features = rng.uniform(0.5, 1.5, (LENGTH, LENGTH))
    value, d_out = rng.standard_normal((2, LENGTH, LENGTH))
    return key_features, query_features @ key_features.T, value, d_out


def _score_gradient(function, kind, size, is_causal):
    """dL/dS of L = sum(out * d_out), with all features of `_problem` multiplied by `size`."""
    key_features, scores, value, d_out = _problem()
    inverse = jnp.asarray(np.linalg.inv(size * key_features).T, jnp.float32)
    key, value, d_out = (
        jnp.asarray(x, jnp.float32)[None, :, None]
        for x in (_inverse_feature_map(kind, size * key_features), value, d_out)
    )

    def loss(scores):
        query_features = jnp.matmul(scores, inverse, precision="highest")
        query = _inverse_feature_map(kind, query_features)[None, :, None]
        out = function(query, key, value, is_causal=is_causal, feature_map=kind, chunk_size=4)
        return jnp.sum(out * d_out)

    return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(size**2 * scores, jnp.float32)), np.float64)


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attentions_gradient_grows_without_bound_as_features_shrink(is_causal):
    """dL/ds_ij = d_out_i . (v_j - out_i) / sum_k s_ik: features 10 times smaller give a gradient 100 times larger."""
    _, scores, value, d_out = _problem()
    scores = np.tril(scores) if is_causal else scores
    total = scores.sum(1, keepdims=True)
    out = scores @ value / total
    expected = (d_out @ value.T - (d_out * out).sum(1, keepdims=True)) / total
    expected = np.tril(expected) if is_causal else expected
    largest = []
    for size in SIZES:
        got = _score_gradient(linear_attention, "elu+1", size, is_causal)
        np.testing.assert_allclose(size**2 * got, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        largest.append(np.abs(got).max())
    np.testing.assert_allclose(np.diff(np.log10(largest)), 2.0, atol=1e-2)
    assert largest[-1] > 1e8
