"""Attention in the buckets of a hash: generation in pieces, and its random directions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax import init_reformer_state, reformer_attention, reformer_rotations
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


def arrays_of(length, heads=4):
    query, _, value, _ = random_qkv(length, heads=heads)
    return query, value


def rotations_for(query, **sizes):
    return reformer_rotations(
        jax.random.key(0), query.shape[3], **{"num_rounds": 2, "num_buckets": 4} | sizes
    )


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
