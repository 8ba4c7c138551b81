"""hopfield_attention against a float64 loop over its steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.dense import hopfield
from brl_jax.attention.dense.hopfield import hopfield_attention
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, outputs_and_gradients, random_qkv, with_padding

run = functools.partial(outputs_and_gradients, hopfield_attention)


def retrieved(query, key, value, visible, steps, scale):
    state = query
    for _ in range(steps - 1):
        state, _ = oracles.softmax_attention(state, key, key, visible, scale=scale)
    return oracles.softmax_attention(state, key, value, visible, scale=scale)[0]


def test_blocks_of_queries_change_nothing(monkeypatch):
    """Packed sequences, padding of NaN and an offset: 20 queries at once equal blocks of 8."""
    arrays = random_qkv(20, 30)
    rng = np.random.default_rng(2)
    segments = tuple(jnp.asarray(np.sort(rng.integers(0, 3, (2, n)), 1)) for n in (20, 30))
    poisoned, lengths, visible = with_padding(arrays, [20, 13], [30, 21])
    options = {"steps": 3, "scale": 0.7, "is_causal": True, "query_offset": 10, "segment_ids": segments}
    call = functools.partial(run, *poisoned, **options, **lengths)
    whole = call()
    visible = visible & oracles.pairs(20, 30, oracles.everything, 10, 0, is_causal=True)
    same = np.asarray(segments[0])[:, :, None] == np.asarray(segments[1])[:, None, :]
    assert_close(whole[:1], [retrieved(*arrays[:3], visible & same[:, None], 3, 0.7)])
    monkeypatch.setattr(hopfield, "QUERY_BLOCK", 8)
    assert_close(call(), whole, 1e-5)


def test_no_square_array():
    """4096 queries on 4096 keys, forward and backward: no array has 4096 x 4096 numbers."""
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    call = functools.partial(hopfield_attention, steps=2, is_causal=True)
    grad = jax.jit(jax.grad(lambda *a: call(*a).sum(), argnums=(0, 1, 2)))
    assert grad.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes < 4 * 4096**2
