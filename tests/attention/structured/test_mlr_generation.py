"""mlr_attention with a state: absent tokens, the size of its cache, and what it refuses; see also test_states.py."""

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


def test_bad_arguments():
    query, key, value, _ = random_qkv(3)
    options = {"ranks": (4, 4), "block_sizes": (None, 8)}
    state = init_mlr_state(2, 2, 8, length=20, **options)
    call = {**options, "is_causal": True, "state": state}
    for changes, message in (
        ({"ranks": (6, 2)}, r"state.keys\[0\] must be float32 of shape \(2, 2, 20, 6\), got"),
        ({"block_sizes": (None, 4)}, r"state.keys\[1\] must be float32 of shape \(2, 2, 4, 4\), got"),
        ({"ranks": (8,), "block_sizes": (None,)}, "state must have 3 arrays, .*, got 4"),
        ({"query_seq_lengths": jnp.ones(2, jnp.int32)}, "query_seq_lengths must be None with a state"),
        ({"state": None, "count": 2}, "count needs a state"),
    ):
        with pytest.raises(ValueError, match=message):
            mlr_attention(query, key, value, **call | changes)
    with pytest.raises(ValueError, match=r"state.keys\[0\] must be float32 of shape \(1, 2, 20, 4\), got"):
        mlr_attention(query[:1], key[:1], value[:1], **call)
    with pytest.raises(ValueError, match="ranks must sum to the head_dim 8"):
        init_mlr_state(2, 2, 8, length=20, ranks=(4, 2), block_sizes=(None, 8))
