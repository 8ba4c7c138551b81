"""The delta rule with a decay of each feature against its recurrence in float64, from weak to strong decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from tests.marks import slow_unless

HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 6, 5
# The logarithms of a token's decay. The last alternate between features and tokens: a weak decay behind a strong one.
DECAYS = {
    "none": np.zeros((1, 1)),
    "weak": np.full((1, 1), -1e-3),
    "strong": np.full((1, 1), -20.0),
    "stronger": np.full((1, 1), -500.0),
    "mixed": -np.asarray([[0, 20, 1e-3], [1e-3, 0, 1e-2], [0.5, 1e3, 1e-3], [20, 0, 0], [0, 1e-3, 90]]),
}


def recurrence(query, key, value, beta, log_decay):
    """One head of one row, token by token."""
    state, out = np.zeros((SIZE, VALUE_SIZE), query.dtype), []
    for q, k, v, b, a in zip(query, key, value, beta, log_decay):
        state = np.exp(a)[:, None] * state
        k = k / np.sqrt((k * k).sum())
        state = state + b * k[:, None] * (v - k @ state)
        out.append(q @ state)
    return np.stack(out)


def expected(arrays):
    """All heads; complex arrays give the derivative along their imaginary parts."""
    query, *others = arrays
    out = np.zeros((*query.shape[:3], VALUE_SIZE), np.result_type(*arrays))
    for row, head in np.ndindex(query.shape[0], HEADS):
        shared = (x[row, :, head * KV_HEADS // HEADS] for x in others)
        out[row, :, head] = recurrence(query[row, :, head], *shared)
    return out


def close(actual, wanted, tolerance):
    assert np.isfinite(np.asarray(actual, np.float64)).all()
    assert np.linalg.norm(actual - wanted) <= tolerance * np.linalg.norm(wanted)


TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
CASES = [
    (length, chunk, decay, dtype)
    for length, chunk in ((67, 64), (40, 24), (19, 16), (1, 64))
    for decay in DECAYS
    for dtype in TOLERANCES
]


@pytest.mark.parametrize(
    ("length", "chunk", "decay", "dtype"), slow_unless(CASES, [(19, 16, "mixed", "float32")])
)
def test_outputs_and_gradients_are_those_of_the_recurrence(length, chunk, decay, dtype):
    rng = np.random.default_rng(length)
    shapes = [(2, length, HEADS, SIZE), (2, length, KV_HEADS, SIZE), (2, length, KV_HEADS, VALUE_SIZE)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    table = DECAYS[decay]
    log_decay = table[np.arange(length) % len(table)][:, np.arange(SIZE) % table.shape[1]]
    arrays += [rng.random((2, length, KV_HEADS)), np.broadcast_to(log_decay[None, :, None], shapes[1])]
    weight = rng.standard_normal((2, length, HEADS, VALUE_SIZE))

    @jax.jit
    def run(*arrays):
        def loss(*arrays):
            cast = [x.astype(dtype) for x in arrays[:4]]
            out = brl_jax.kimi_delta_rule(*cast, arrays[4], chunk_size=chunk)
            return jnp.sum(out.astype(jnp.float32) * weight.astype(np.float32)), out

        return jax.grad(loss, argnums=range(5), has_aux=True)(*arrays)

    wanted = expected(arrays)
    changes = [rng.standard_normal(x.shape) for x in arrays]
    gradients, out = run(*(jnp.asarray(x, jnp.float32) for x in arrays))
    close(np.asarray(out, np.float64), wanted, TOLERANCES[dtype])
    for i, (gradient, change) in enumerate(zip(gradients, changes)):
        moved = [x + 1e-30j * change if i == j else x for j, x in enumerate(arrays)]
        slopes = weight * np.imag(expected(moved)) / 1e-30
        got = np.sum(np.asarray(gradient, np.float64) * change)
        assert abs(got - slopes.sum()) <= TOLERANCES[dtype] * np.linalg.norm(slopes) + 1e-6


@pytest.mark.slow
def test_a_decay_that_all_features_share_is_that_of_the_gated_rule():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 21, 2, 4)), jnp.float32) for _ in range(3))
    beta, log_decay = (jnp.asarray(rng.random((1, 21, 2)), jnp.float32) for _ in range(2))
    of_features = jnp.broadcast_to(-3 * log_decay[..., None], key.shape)
    kimi = brl_jax.kimi_delta_rule(query, key, value, beta, of_features, chunk_size=8)
    gated = brl_jax.gated_delta_rule(query, key, value, beta, -3 * log_decay, chunk_size=8)
    np.testing.assert_allclose(kimi, gated, rtol=1e-5, atol=1e-5)
