"""Attention in the buckets of a hash: special cases, padding, and generation in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import full_attention, init_reformer_state, reformer_attention, reformer_rotations
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


def arrays_of(length, heads=4):
    query, _, value, _ = random_qkv(length, heads=heads)
    return query, value


def rotations_for(query, **sizes):
    return reformer_rotations(
        jax.random.key(0), query.shape[3], **{"num_rounds": 2, "num_buckets": 4} | sizes
    )


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_bucket_is_full_attention_to_others(is_causal):
    """With directions of 0, all tokens share one bucket in each of three rounds."""
    query, value = arrays_of(11)
    rotations = jnp.zeros((3, query.shape[3], 1))
    key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    mask = np.tri(11, k=-1, dtype=bool) if is_causal else ~np.eye(11, dtype=bool)
    mask = mask | np.diag(~mask.any(1))
    values = jnp.repeat(value, 2, axis=2)
    expected = full_attention(query, key, values, mask=jnp.asarray(mask))
    call = jax.jit(functools.partial(reformer_attention, chunk_size=11, is_causal=is_causal))
    assert relative_error(call(query, value, rotations), expected) < 1e-5
    # Smaller chunks don't reach back far enough.
    assert relative_error(reformer_attention(query, value, rotations, chunk_size=3), expected) > 1e-2


def test_steps_of_which_some_tokens_exist():
    """Tokens beyond `count` leave no trace, in the sorted form (7 new tokens) and in the plain one (2)."""
    query, value = arrays_of(20)
    rotations = rotations_for(query)
    expected = jax.jit(functools.partial(reformer_attention, chunk_size=2, is_causal=True))(
        query, value, rotations
    )
    step = jax.jit(functools.partial(reformer_attention, chunk_size=2, is_causal=True, return_state=True))
    state = init_reformer_state(
        query.shape[0], value.shape[2], query.shape[3], length=20, num_heads=query.shape[2], num_rounds=2,
        num_buckets=4,
    )  # fmt: skip
    outputs, start = [], 0
    for size, count in ((7, 5), (2, 1), (2, 2), (7, 7), (7, 5)):
        piece = (
            jnp.pad(x, ((0, 0), (0, 7), (0, 0), (0, 0)))[:, start : start + size] for x in (query, value)
        )
        out, state = step(*piece, rotations, state=state, count=jnp.int32(count))
        outputs.append(out[:, :count])
        start += count
    assert start == int(state.length) == 20
    assert relative_error(jnp.concatenate(outputs, 1), expected) < 1e-5


def test_directions_are_drawn_from_the_key():
    first, again, other = (reformer_rotations(jax.random.key(seed), 8, num_buckets=6) for seed in (0, 0, 1))
    assert first.shape == (4, 8, 3)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
