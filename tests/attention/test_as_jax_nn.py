"""`full_attention` and `local_attention` against `jax.nn.dot_product_attention`: unbatched arrays, residuals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import full_attention, local_attention
from brl_jax.attention.local.far_patterns import Strided

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 20, 4, 2, 8
LENGTHS = np.array([20, 13], np.int32)


def _arrays(batched, dtype=jnp.float32):
    """query, key, value, bias and a mask in which every query sees itself."""
    keys = jax.random.split(jax.random.key(0), 5)
    head = (BATCH, LENGTH)
    q, k, v = (
        jax.random.normal(key, (*head, n, HEAD_DIM), dtype)
        for key, n in zip(keys, (HEADS, KV_HEADS, KV_HEADS))
    )
    bias = jax.random.normal(keys[3], (BATCH, HEADS, LENGTH, LENGTH), dtype)
    mask = jax.random.bernoulli(keys[4], 0.7, bias.shape) | jnp.eye(LENGTH, dtype=bool)[None, None]
    arrays = (q, k, v, bias, mask)
    return arrays if batched else tuple(x[1] for x in arrays)


def _residual(query, key, bias, mask, *, visible, sinks=None, cap=None):
    """The log-sum-exp from its definition, (..., T, N)."""
    key = jnp.repeat(key, HEADS // KV_HEADS, axis=-2)
    scores = jnp.einsum("...tnh,...snh->...nts", query, key) / np.sqrt(HEAD_DIM)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    seen = visible if mask is None else mask & visible
    sums = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0)), 0.0).sum(-1)
    sums = sums if sinks is None else sums + jnp.exp(sinks)[None, :, None]
    return jnp.swapaxes(jnp.log(sums), -1, -2)


def _check(ours, batched, window, is_causal, biased, lengths):
    query, key, value, bias, mask = _arrays(batched)
    bias, mask = (bias, mask) if biased else (None, None)
    options = {"is_causal": is_causal}
    if window is not None:
        options["local_window_size"] = window
    counts = (LENGTHS if batched else LENGTHS[1:]) if lengths else None
    if lengths:
        options |= {"query_seq_lengths": counts, "key_value_seq_lengths": counts}
    distance = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]
    left, right = window or (LENGTH, LENGTH)
    visible = ((distance >= -left) & (distance <= (0 if is_causal else right)))[None, None]
    inside = np.ones((BATCH, LENGTH) if batched else (LENGTH,), bool)
    if lengths:
        counted = np.arange(LENGTH) < counts[:, None]
        visible = visible & counted[:, None, None, :]
        inside = counted if batched else counted[0]
    visible = visible if batched else visible[0]
    random = np.random.default_rng(1)
    d_out = random.normal(size=query.shape).astype(np.float32)
    d_lse = random.normal(size=query.shape[:-1]).astype(np.float32)

    def loss(function, arrays):
        out, lse = function(*arrays)
        used = jnp.where(inside[..., None], lse, 0.0)  # `jax.nn` gives no -inf there
        return jnp.sum(out * d_out) + jnp.sum(used * d_lse), (out, used)

    def mine(query, key, value, bias):
        return ours(query, key, value, bias, mask, return_residual=True, **options)

    def standard(query, key, value, bias):
        out, lse = jax.nn.dot_product_attention(
            query, key, value, bias, mask, return_residual=True, **options
        )
        # `jax.nn` stops the residual's gradient.
        exact = _residual(query, key, bias, mask, visible=visible)
        live = jnp.where(inside[..., None], exact, 0.0)
        return out, lse + live - jax.lax.stop_gradient(live)

    arrays = (query, key, value, bias)
    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, function), has_aux=True))(arrays)
        for function in (mine, standard)
    ]
    (got, expected) = results
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


CASES = [
    (function, window, *flags)
    for function, window in ((full_attention, None), (local_attention, (4, 3)))
    for flags in itertools.product((True, False), repeat=4)
]
FAST = [case for case in CASES if case[2:] == (False, True, True, True)]


@pytest.mark.parametrize(
    ("function", "window", "batched", "is_causal", "biased", "lengths"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_values_and_gradients(function, window, batched, is_causal, biased, lengths):
    """Includes the residual. The fast cases are unbatched."""
    _check(function, batched, window, is_causal, biased, lengths)


@pytest.mark.parametrize("function", [full_attention, local_attention])
def test_residual_of_a_query_without_keys(function):
    query, key, value, *_ = _arrays(True, jnp.bfloat16)
    options = {} if function is full_attention else {"local_window_size": 3}

    def residual(query, sinks):
        attend = functools.partial(function, query, key[0], value[0], return_residual=True, **options)
        some = attend(segment_ids=segments, sinks=sinks)[1]
        none = attend(key_value_seq_lengths=0 if function is full_attention else jnp.int32(0))
        assert some.shape == none[1].shape == (LENGTH, HEADS)
        assert some.dtype == none[1].dtype == jnp.bfloat16
        return some.astype(jnp.float32).sum(), (some, none)

    sinks = jnp.arange(HEADS, dtype=jnp.float32)
    segments = jnp.zeros(LENGTH, jnp.int32).at[:5].set(1), jnp.zeros(LENGTH, jnp.int32)
    gradients, (some, (out, lse)) = jax.jit(jax.grad(residual, (0, 1), has_aux=True))(query[0], sinks)
    assert np.all(np.isneginf(lse))
    assert np.all(out == 0)
    np.testing.assert_array_equal(some[:5].astype(jnp.float32), np.broadcast_to(sinks, (5, HEADS)))
    assert np.all(np.asarray(some[5:], np.float32) > sinks[None])
    assert np.all(gradients[0][:5] == 0)
    assert np.all(np.isfinite(gradients[0]))
    assert np.all((gradients[1] > 5) & (gradients[1] < LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (full_attention, {}),
        (local_attention, {"local_window_size": LENGTH}),
        (local_attention, {"local_window_size": LENGTH, "implementation": "pallas_interpret"}),
        (local_attention, {"pattern": Strided(1), "implementation": "pallas_interpret"}),
    ],
    ids=("full", "local", "local-kernel", "strided-kernel"),
)
def test_sinks_and_soft_cap_are_in_the_residual(function, options):
    query, key, value, *_ = _arrays(True)
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    d_lse = np.random.default_rng(1).normal(size=query.shape[:-1]).astype(np.float32)

    def mine(query, key, sinks):
        out, lse = function(
            query, key, value, sinks=sinks, logits_soft_cap=0.8, return_residual=True, **options
        )
        return (lse * d_lse).sum() + 0 * out.sum(), lse

    def plain(query, key, sinks):
        lse = _residual(query, key, None, None, visible=np.ones((1, 1, 1, 1), bool), sinks=sinks, cap=0.8)
        return (lse * d_lse).sum(), lse

    got, expected = (
        jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, sinks) for loss in (mine, plain)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("function", [full_attention, local_attention])
def test_cudnn_refuses_the_residual(function):
    query, key, value, *_ = _arrays(True, jnp.bfloat16)
    options = {} if function is full_attention else {"local_window_size": (3, 0)}
    with pytest.raises(NotImplementedError, match=r"cudnn' supports .* only with no return_residual"):
        function(query, key, value, implementation="cudnn", return_residual=True, **options)


def test_residual_of_long_windows():
    """Long enough for a CPU's tiles; compared with `full_attention`, which the tests above compare with `jax.nn`."""
    length, left, right = 150, 20, 5
    random = np.random.default_rng(2)
    shapes = [(2, length, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    query, key, value, d_out = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    d_lse = random.normal(size=d_out.shape[:-1]).astype(np.float32)
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    mask = jnp.asarray((distance >= -left) & (distance <= right))
    lengths = np.array([length, 90], np.int32)

    def gradients(attend, **options):
        def loss(query, key, value, sinks):
            out, lse = attend(
                query, key, value, sinks=sinks, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
                return_residual=True, **options,
            )  # fmt: skip
            return jnp.sum(out * d_out) + jnp.sum(lse * d_lse), (out, lse)

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(query, key, value, sinks)

    got = gradients(local_attention, local_window_size=(left, right))
    expected = gradients(full_attention, mask=mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-5)
