"""The Long-Short Transformer's attention: its cost, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import local_attention, long_short_attention
from brl_jax.attention.local.patterns import SurroundedBlocks
from brl_jax.attention.low_rank.long_short import Norms
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def arrays(length, rank=3):
    query, key, value, _ = random_qkv(length, heads=4)
    return query, key, value, normal(2, length, key.shape[2], rank)


@pytest.mark.slow
def test_projected_keys_that_nobody_notices():
    """If their scores are far below the window's, only local attention in surrounded blocks remains."""
    query, key, value, projection = arrays(40)
    norms = Norms(None, jnp.zeros((2, 8)))
    query = query.at[..., 0].set(60.0)
    key = key.at[..., 0].set(3.0)
    got = long_short_attention(query, key, value, projection, window=6, norms=norms)
    centred = [x - x.mean((2, 3), keepdims=True) for x in (key, value)]
    tokens = [x / jnp.sqrt(jnp.square(x).mean((2, 3), keepdims=True) + 1e-5) for x in centred]
    expected = local_attention(query, *tokens, pattern=SurroundedBlocks(6, 3))
    assert relative_error(got, expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_grows_linearly(is_causal):
    """Bidirectional, and causal with 64 chunks at both lengths."""

    def size(length):
        call = functools.partial(
            long_short_attention, window=128, chunk_size=length // 64, is_causal=is_causal
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(length, rank=8)]
        gradient = jax.jit(jax.grad(lambda *a: call(*a).sum(), argnums=(0, 1, 2, 3)))
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert size(2**14) <= 2.2 * size(2**13)
