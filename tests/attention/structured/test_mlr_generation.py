"""mlr_attention_step gives for pieces of a sequence what mlr_attention gives for all of it; the size of its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_generation import init_mlr_state, mlr_attention_step
from tests.support.attention import random_qkv

LENGTH = 61
# name: (ranks, block sizes, whether scores are divided)
LEVELS = {
    "nested": ((4, 2, 2), (None, 16, 4), False),
    "divided": ((4, 2, 2), (None, 24, 8), True),
    "no_common_block": ((4, 4), (20, 5), True),
}


@pytest.mark.parametrize("value_dim", [None, 5])
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [7, 1, 9, 1, 1, 20, 1, 5, 16]], ids=["steps", "pieces"])
def test_pieces_are_the_whole(name, sizes, value_dim):
    query, key, value = random_qkv(LENGTH)[:3]
    arrays = [query, key, value[..., :value_dim]]
    ranks, blocks, divide = LEVELS[name]
    options = {"ranks": ranks, "block_sizes": blocks, "divide_by_levels": divide}
    expected = jax.jit(functools.partial(mlr_attention, is_causal=True, **options))(*arrays)
    arrays = [np.asarray(x) for x in arrays]
    state = init_mlr_state(2, LENGTH, 2, 8, ranks=ranks, block_sizes=blocks, value_dim=value_dim)
    # The state contains the ranks and the block sizes.
    step = jax.jit(functools.partial(mlr_attention_step, divide_by_levels=divide))
    outputs, start = [], 0
    for size in sizes:
        out, state = step(*(x[:, start : start + size] for x in arrays), state)
        outputs.append(out)
        start += size
    assert start == LENGTH == int(state.tokens)
    np.testing.assert_allclose(np.concatenate(outputs, 1), expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_do_not_exist_leave_no_trace():
    arrays = random_qkv(LENGTH)[:3]
    options = {"ranks": (4, 2, 2), "block_sizes": (None, 16, 4)}
    step = jax.jit(functools.partial(mlr_attention_step, **options))
    start = init_mlr_state(2, LENGTH, 2, 8, **options)
    _, filled = step(*(x[:, :14] for x in arrays), start)
    out, exact = step(*(x[:, 14:19] for x in arrays), filled)
    poisoned = [x.at[:, 19:].set(1e9) for x in arrays]
    padded, short = step(*(x[:, 14:25] for x in poisoned), filled, count=jnp.int32(5))
    np.testing.assert_allclose(padded[:, :5], out, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(short)):
        np.testing.assert_array_equal(a, b)


def test_cache_is_as_large_as_the_formula_says():
    """sum_l r_l T / 2^(l-1) numbers (arXiv:2509.07963, section 3.4): for 8 equal ranks 1 / 4 of full attention's."""
    length = 1024
    ranks, sizes = (8,) * 8, tuple(length // 2**level for level in range(8))
    state = init_mlr_state(3, length, 2, 64, ranks=ranks, block_sizes=sizes)
    numbers = sum(keys.size for keys in state.keys)
    assert numbers == 3 * 2 * sum(r * length // 2**level for level, r in enumerate(ranks))
    assert 4 * numbers == pytest.approx(3 * 2 * 64 * length, rel=0.01)
    assert state.value.shape == (3, 2, length, 64)


def test_bad_arguments():
    query, key, value, _ = random_qkv(3)
    options = {"ranks": (4, 4), "block_sizes": (None, 8)}
    state = init_mlr_state(2, 20, 2, 8, **options)
    with pytest.raises(ValueError, match="state must be made for these ranks"):
        mlr_attention_step(query, key, value, state, ranks=(6, 2), block_sizes=(None, 8))
    with pytest.raises(ValueError, match="state must be made for these ranks"):
        mlr_attention_step(query, key, value, state, block_sizes=(None, 4))
    with pytest.raises(
        ValueError, match="state must be made for the head_dim 4, got one whose ranks sum to 8"
    ):
        mlr_attention_step(query[..., :4], key[..., :4], value, state)
    with pytest.raises(ValueError, match=r"state.keys\[0\] must be float32 of shape \(1, 2, 20, 4\), got"):
        mlr_attention_step(query[:1], key[:1], value[:1], state)
    with pytest.raises(ValueError, match="state must be an MLRState from init_mlr_state, got NoneType"):
        mlr_attention_step(query, key, value, None)
    with pytest.raises(ValueError, match="ranks must sum to the head_dim 8"):
        init_mlr_state(2, 20, 2, 8, ranks=(4, 2), block_sizes=(None, 8))
    with pytest.raises(ValueError, match="length must be an int of at least 1"):
        init_mlr_state(2, 0, 2, 8, **options)
