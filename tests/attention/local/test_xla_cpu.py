"""Sliding windows in tiles (the CPU's path for long sequences) against the float64 oracle.

The sizes give several steps of several blocks, windows that end inside a tile, and windows of whole tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import local_attention
from brl_jax.attention.local.call import PatternCall
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.local.xla_cpu import WindowTiling
from tests.attention.local.cases import run
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, random_qkv

# name: length, left, right, is_causal, and the tiling's (tile, before, gap)
WINDOWS = {
    "one tile": (1100, 63, 0, True, (64, 1, 0)),
    "less than a tile": (700, 4, 0, True, (64, 1, 59)),
    "ends in a tile": (650, 69, 0, True, (64, 2, 58)),
    "several tiles": (1300, 255, 0, True, (128, 2, 0)),
    "both sides": (700, 40, 23, False, (64, 1, 0)),
    "both sides, ends in a tile": (650, 30, 60, False, (64, 2, 37)),
    "ahead only": (330, 0, 10, False, (64, 1, 53)),
}


def make_call(left, right, is_causal, arrays):
    num_queries, num_keys = (x.shape[1] for x in arrays[:2])
    return PatternCall(
        pattern=SlidingWindow(left, right),
        is_causal=is_causal,
        scale=1.0,
        num_queries=num_queries,
        num_keys=num_keys,
    )


@pytest.mark.parametrize("name", slow_unless(WINDOWS, ("ends in a tile", "both sides, ends in a tile")))
def test_tiles_equal_oracle(name):
    length, left, right, is_causal, tiling = WINDOWS[name]
    arrays = random_qkv(length, batch=1)
    chosen = WindowTiling.of(make_call(left, right, is_causal, arrays), *arrays[:2])
    assert (chosen.tile, chosen.before, chosen.gap) == tiling
    got = run(*arrays, local_window_size=(left, right), is_causal=is_causal)
    visible = oracles.pairs(length, length, oracles.sliding(left, right), is_causal=is_causal)
    assert_close(got, expect(arrays, visible), 1e-5)


@pytest.mark.parametrize(("right", "is_causal"), slow_unless([(0, True), (20, False)], (0,)))
def test_lengths_segments_and_head_groups(right, is_causal):
    """NaN in padding, packed rows, and more heads than one step processes."""
    length, left = 400, 150
    arrays = random_qkv(length, batch=2, heads=24, kv_heads=12)
    tiling = WindowTiling.of(make_call(left, right, is_causal, arrays), *arrays[:2])
    assert tiling.heads < 12
    rng = np.random.default_rng(1)
    lengths = np.array([400, 261])
    segments = np.sort(rng.integers(0, 3, (2, length)), -1).astype(np.int32)
    inside = np.arange(length) < lengths[:, None]
    visible = (
        oracles.pairs(length, length, oracles.sliding(left, right), is_causal=is_causal)
        & inside[:, None, None, :]
        & (segments[:, None, :, None] == segments[:, None, None, :])
    )
    expected = expect(arrays, visible)
    query, key, value, d_out = arrays
    key, value = (jnp.where(inside[..., None, None], x, jnp.nan) for x in (key, value))
    got = run(
        query, key, value, d_out, local_window_size=(left, right), is_causal=is_causal,
        key_value_seq_lengths=jnp.asarray(lengths), segment_ids=jnp.asarray(segments),
    )  # fmt: skip
    assert_close(got, expected, 1e-5)


def test_causal_bitwise():
    """A changed token leaves all earlier outputs unchanged, in every block and step."""
    query, key, value, _ = random_qkv(700, batch=1)
    attend = jax.jit(lambda k, v: local_attention(query, k, v, local_window_size=(99, 0), is_causal=True))
    before = attend(key, value)
    for changed in (0, 63, 64, 511, 640, 699):
        after = attend(key.at[:, changed].set(7.0), value.at[:, changed].set(7.0))
        np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
        assert (after[:, changed] != before[:, changed]).any()


def test_large_logits_and_half_precision():
    query, key, value, d_out = random_qkv(500, batch=1)
    arrays = (query * 1e3, key, value, d_out)
    visible = oracles.pairs(500, 500, oracles.sliding(40, 0), is_causal=True)
    assert_close(run(*arrays, local_window_size=40, is_causal=True)[:1], expect(arrays, visible)[:1], 1e-5)
    half = [x.astype(jnp.bfloat16) for x in (query, key, value, d_out)]
    got = run(*half, local_window_size=40, is_causal=True)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(got, expect([x.astype(jnp.float32) for x in half], visible), 1e-2)


@pytest.mark.parametrize(
    ("length", "left", "why"), [(64, 8, "one block"), (5000, 3000, "too many tiles"), (100, 99, "all keys")]
)
def test_left_to_the_general_loop(length, left, why):
    arrays = random_qkv(length, batch=1)
    assert WindowTiling.of(make_call(left, 0, True, arrays), *arrays[:2]) is None, why
