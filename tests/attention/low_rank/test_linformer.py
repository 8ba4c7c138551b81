"""linformer_attention against the float64 oracle on keys and values projected in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.low_rank.linformer import linformer_attention
from tests.attention.local.test_local import assert_close, random_qkv
from tests.oracles import attention as oracles


def projections(shape, seed=3, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype) for _ in range(2)]


def projected(projection, x):
    """(B, S, K, H) by (K, R, L) or (R, L), row by row."""
    x, projection = np.asarray(x, np.float64), np.asarray(projection, np.float64)
    out = np.zeros((x.shape[0], projection.shape[-2], *x.shape[2:]))
    for head in range(x.shape[2]):
        own = projection[head] if projection.ndim == 3 else projection
        for row in range(own.shape[0]):
            for j in range(x.shape[1]):
                out[:, row, head] += own[row, j] * x[:, j, head]
    return out


@pytest.mark.parametrize("shape", [(6, 30), (2, 6, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)])
def test_equals_oracle(shape, dtype, tolerance):
    query, key, value, _ = random_qkv(30, dtype=dtype)
    e, f = projections(shape, dtype=dtype)
    got = jax.jit(linformer_attention)(query, key, value, key_projection=e, value_projection=f)
    assert got.dtype == dtype
    expected, _ = oracles.softmax_attention(query, projected(e, key), projected(f, value), True)
    assert_close([got], [expected], tolerance)


def test_gradients():
    query, key, value, d_out = random_qkv(30)
    e, f = projections((6, 30))

    def call(query, key, value, e, f):
        return linformer_attention(query, key, value, key_projection=e, value_projection=f)

    got = jax.jit(lambda *a: jax.vjp(call, *a)[1](d_out))(query, key, value, e, f)
    small_key, small_value = projected(e, key), projected(f, value)
    d_query, d_key, d_value, _ = oracles.softmax_attention_gradients(
        query, small_key, small_value, True, d_out
    )
    expected = (
        d_query,
        np.einsum("rs,brkh->bskh", e, d_key),
        np.einsum("rs,brkh->bskh", f, d_value),
        np.einsum("brkh,bskh->rs", d_key, key),
        np.einsum("brkh,bskh->rs", d_value, value),
    )
    for x, y in zip(got, expected):
        assert oracles.relative_error(x, y) < 1e-4


def test_padding_enters_nothing():
    """NaN beyond the lengths: each sequence gives what it gives alone, and finite gradients."""
    query, key, value, d_out = random_qkv(30)
    e, f = projections((6, 40))
    lengths = np.array([30, 11])
    inside = (np.arange(30)[None] < lengths[:, None])[:, :, None, None]
    call = functools.partial(linformer_attention, key_projection=e, value_projection=f)
    padded = functools.partial(
        call, query_seq_lengths=jnp.asarray(lengths), key_value_seq_lengths=jnp.asarray(lengths)
    )
    poisoned = [jnp.where(inside, x, jnp.nan) for x in (query, key, value)]
    out, pull = jax.vjp(padded, *poisoned)
    alone = call(query[1:, :11], key[1:, :11], value[1:, :11])
    assert_close([out[1:, :11]], [alone], 1e-5)
    assert not np.asarray(out[1, 11:]).any()
    for gradient in pull(jnp.where(inside, d_out, jnp.nan)):
        assert np.isfinite(np.asarray(gradient)).all()
        assert not np.asarray(gradient)[1, 11:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"value_projection": jnp.ones((4, 3, 6))},
            r"value_projection must have shape \(rows, length\) or \(2, rows, length\), got \(4, 3, 6\)",
        ),
        (
            {"key_projection": jnp.ones((3, 6), jnp.bfloat16)},
            "key_projection must have key's dtype float32, got bfloat16",
        ),
    ],
)
def test_bad_input(changes, message):
    arguments = {"key_projection": jnp.ones((3, 6)), "value_projection": jnp.ones((3, 6))} | changes
    with pytest.raises(ValueError, match=message):
        linformer_attention(*random_qkv(6)[:3], **arguments)
