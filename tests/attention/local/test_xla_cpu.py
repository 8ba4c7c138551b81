"""Windows in tiles on a CPU against the float64 oracle.

The sizes give several steps of several blocks, windows that end inside a tile, and windows of whole tiles."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import local_attention
from brl_jax.attention.local.patterns import CallArrays, PatternCall, SlidingWindow
from brl_jax.attention.local.xla_cpu import WindowTiling
from tests.attention.local.cases import run
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, check_causal, expect, random_qkv, with_padding

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


def tiling(left, right, arrays, is_causal):
    """The tiling of a call; None if the general loop computes it."""
    sizes = {"num_queries": arrays[0].shape[1], "num_keys": arrays[1].shape[1]}
    call = PatternCall(pattern=SlidingWindow(left, right), scale=1.0, is_causal=is_causal, **sizes)
    return WindowTiling.of(call, CallArrays(*arrays[:3]))


@pytest.mark.parametrize("name", slow_unless(WINDOWS, ("ends in a tile", "both sides, ends in a tile")))
def test_tiles_equal_oracle(name):
    length, left, right, is_causal, sizes = WINDOWS[name]
    arrays = random_qkv(length, batch=1)
    chosen = tiling(left, right, arrays, is_causal)
    assert (chosen.tile, chosen.before, chosen.gap) == sizes
    got = run(*arrays, local_window_size=(left, right), is_causal=is_causal)
    visible = oracles.pairs(length, length, oracles.sliding(left, right), is_causal=is_causal)
    assert_close(got, expect(arrays, visible), 1e-5)


@pytest.mark.parametrize(("right", "is_causal"), slow_unless([(0, True), (20, False)], (0,)))
def test_lengths_segments_and_head_groups_in_tiles(right, is_causal):
    """NaN in padding, packed rows, and more heads than one step processes."""
    arrays = random_qkv(400, batch=2, heads=24, kv_heads=12)
    pattern, sees = SlidingWindow(150, right), oracles.sliding(150, right)
    assert tiling(150, right, arrays, is_causal).heads < 12
    ids = np.sort(np.random.default_rng(1).integers(0, 3, (2, 400)), -1).astype(np.int32)
    (_, key, value, _), lengths, visible = with_padding(arrays, [400, 400], [400, 261])
    visible = visible & oracles.pairs(400, 400, sees, is_causal=is_causal)
    visible = visible & (ids[:, None, :, None] == ids[:, None, None])
    options = {"pattern": pattern, "is_causal": is_causal, "segment_ids": jnp.asarray(ids)}
    got = run(
        arrays[0], key, value, arrays[3], key_value_seq_lengths=lengths["key_value_seq_lengths"], **options
    )
    assert_close(got, expect(arrays, visible), 1e-5)


def test_causal_bitwise():
    """In every block and step."""
    attend = functools.partial(local_attention, local_window_size=(99, 0), is_causal=True)
    check_causal(attend, random_qkv(700, batch=1), (0, 63, 64, 511, 640, 699))


def test_large_logits_and_half_precision():
    query, key, value, d_out = random_qkv(500, batch=1)
    visible = oracles.pairs(500, 500, oracles.sliding(40, 0))
    options = {"local_window_size": (40, 40), "is_causal": True}
    arrays = (query * 1e3, key, value, d_out)
    assert_close(run(*arrays, **options)[:1], expect(arrays, visible)[:1], 1e-5)
    half = [x.astype(jnp.bfloat16) for x in (query, key, value, d_out)]
    got = run(*half, **options)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(got, expect([x.astype(jnp.float32) for x in half], visible), 1e-2)


@pytest.mark.parametrize(
    ("length", "left", "why"), [(64, 8, "one block"), (5000, 3000, "too many tiles"), (100, 99, "all keys")]
)
def test_windows_left_to_the_general_loop(length, left, why):
    assert tiling(left, 0, random_qkv(length, batch=1), True) is None, why
