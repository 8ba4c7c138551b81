"""linformer_attention: padding, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.low_rank.linformer import linformer_attention
from tests.support.attention import assert_close, random_qkv


def projections(shape, seed=3, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype) for _ in range(2)]


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
