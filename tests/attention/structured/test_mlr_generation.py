"""mlr_attention with a state: absent tokens and the size of its cache; see also test_states.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_generation import init_mlr_state
from tests.support.attention import random_qkv

LENGTH = 61


def extend(**levels):
    return jax.jit(functools.partial(mlr_attention, is_causal=True, return_state=True, **levels))


def test_tokens_that_do_not_exist_leave_no_trace():
    arrays = random_qkv(LENGTH)[:3]
    options = {"ranks": (4, 2, 2), "block_sizes": (None, 16, 4)}
    step = extend(**options)
    start = init_mlr_state(2, 2, 8, length=LENGTH, **options)
    _, filled = step(*(x[:, :14] for x in arrays), state=start)
    out, exact = step(*(x[:, 14:19] for x in arrays), state=filled)
    poisoned = [x.at[:, 19:].set(1e9) for x in arrays]
    padded, short = step(*(x[:, 14:25] for x in poisoned), state=filled, count=jnp.int32(5))
    np.testing.assert_allclose(padded[:, :5], out, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(short)):
        np.testing.assert_array_equal(a, b)


def test_cache_is_as_large_as_the_formula_says():
    """sum_l r_l T / 2^(l-1) numbers (arXiv:2509.07963, section 3.4): for 8 equal ranks 1 / 4 of full attention's."""
    length = 1024
    ranks, sizes = (8,) * 8, tuple(length // 2**level for level in range(8))
    state = init_mlr_state(3, 2, 64, length=length, ranks=ranks, block_sizes=sizes)
    numbers = sum(keys.size for keys in state.keys)
    assert numbers == 3 * 2 * sum(r * length // 2**level for level, r in enumerate(ranks))
    assert 4 * numbers == pytest.approx(3 * 2 * 64 * length, rel=0.01)
    assert state.value.shape == (3, 2, length, 64)
