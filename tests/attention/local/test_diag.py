"""diag_attention and its step against float64 references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.local.diag import diag_attention, init_diag_state
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, outputs_and_gradients, random_qkv, with_padding


def relu_expect(arrays, visible, scale=None):
    """Output and gradients of ReLU attention in float64."""
    query, key, value, d_out = (np.asarray(x, np.float64) for x in arrays)
    kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    wide_key, wide_value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    scores = np.where(visible, scale * np.einsum("btnh,bsnh->bnts", query, wide_key), 0.0)
    weights = np.maximum(scores, 0)
    d_scores = (scores > 0) * np.einsum("btnh,bsnh->bnts", d_out, wide_value)
    fold = lambda x: x.reshape(*x.shape[:2], kv_heads, group, x.shape[3]).sum(3)  # noqa: E731
    return (
        np.einsum("bnts,bsnh->btnh", weights, wide_value),
        scale * np.einsum("bnts,bsnh->btnh", d_scores, wide_key),
        fold(scale * np.einsum("bnts,btnh->bsnh", d_scores, query)),
        fold(np.einsum("bnts,btnh->bsnh", weights, d_out)),
    )


run = functools.partial(outputs_and_gradients, diag_attention)
EXPECT = {"softmax": expect, "relu": relu_expect}


def test_bfloat16_and_scale():
    arrays = random_qkv(40, head_dim=16, dtype=jnp.bfloat16)
    got = run(*arrays, block_size=16, score="relu", is_causal=True, scale=0.3)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    visible = oracles.pairs(40, 40, oracles.block_diagonal(16), is_causal=True)
    assert_close(got, relu_expect(arrays, visible, scale=0.3), 2e-2)


@pytest.mark.parametrize("score", EXPECT)
def test_lengths_and_poisoned_padding(score):
    arrays = random_qkv(30, batch=3)
    poisoned, lengths, visible = with_padding(arrays, [30, 12, 1], [20, 30, 0])
    got = run(*poisoned, block_size=8, score=score, **lengths)
    assert_close(got, EXPECT[score](arrays, visible & oracles.pairs(30, 30, oracles.block_diagonal(8))))


@pytest.mark.parametrize("score", EXPECT)
def test_pieces_of_any_size(score):
    """2,000 tokens in pieces, some of them followed by padding (NaN)."""
    query, key, value, _ = random_qkv(2000, batch=1, head_dim=8)
    expected = jax.jit(functools.partial(diag_attention, score=score, is_causal=True))(query, key, value)
    state = init_diag_state(1, key.shape[2], 8)
    step = jax.jit(functools.partial(diag_attention, score=score, is_causal=True, return_state=True))
    outputs, start = [], 0
    for size, pad in ((1, 0), (7, 3), (56, 0), (64, 0), (1000, 90), (1, 5), (871, 0)):
        pieces = [
            jnp.pad(x[:, start : start + size], ((0, 0), (0, pad), (0, 0), (0, 0)), constant_values=np.nan)
            for x in (query, key, value)
        ]
        out, state = step(*pieces, state=state, count=jnp.int32(size))
        outputs.append(out[:, :size])
        start += size
        assert int(state.length) == start
        # The state keeps only the current block's tokens.
        np.testing.assert_array_equal(state.key[:, : start % 64], key[:, start - start % 64 : start])
        assert not np.asarray(state.value)[:, start % 64 :].any()
    assert start == 2000
    assert_close([jnp.concatenate(outputs, axis=1)], [expected], 1e-5)


def test_a_count_of_64_bits_leaves_the_state_its_types():
    """A scan can carry the state only if a count from an array leaves its dtypes unchanged."""
    query, key, value, _ = random_qkv(3, batch=2, heads=4, kv_heads=2, head_dim=8)

    def step(state, count):
        return diag_attention(
            query, key, value, block_size=4, is_causal=True, state=state, count=count, return_state=True
        )[::-1]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        state, _ = jax.lax.scan(step, _state(), jnp.asarray([1, 2, 3]))
    assert state.length.dtype == jnp.int32
    assert int(state.length) == 6


def _state(**changes):
    return init_diag_state(2, 2, 8, block_size=4)._replace(**changes)
