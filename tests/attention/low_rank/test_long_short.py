"""The Long-Short Transformer's attention: its cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import long_short_attention
from tests.support.attention import random_qkv


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def arrays(length, rank=3):
    query, key, value, _ = random_qkv(length, heads=4)
    return query, key, value, normal(2, length, key.shape[2], rank)


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
