"""The CPU's faster forms of local attention against the float64 oracle: windows in tiles, and grids by shifts.

The sizes give several steps of several blocks, windows that end inside a tile, and windows of whole tiles. The grids
have an incomplete last row, margins between heads that a wrong offset would cross, and windows as wide as a row, for
which two cells of the window have the same distance in the sequence."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import local_attention
from brl_jax.attention.local.patterns import Neighbourhood, PatternCall, SlidingWindow
from brl_jax.attention.local.xla_cpu import WindowTiling
from brl_jax.attention.local.xla_cpu_grid import GridShifts
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
# name: length, width, rows, columns, is_causal, key_offset, and the number of offsets
GRIDS = {
    "square": (144, 12, 1, 1, False, 0, 9),
    "ragged": (203, 20, 2, 1, False, 0, 15),
    "causal": (203, 20, 1, 2, True, 0, 8),
    "in the middle of a row": (150, 17, 1, 1, False, 5, 9),
    "columns alone": (100, 9, 0, 2, False, 0, 5),
    "rows alone": (110, 30, 2, 0, False, 0, 5),
    "wider than the row": (60, 4, 1, 3, False, 0, 15),
    "higher than the grid": (70, 31, 9, 1, False, 0, 15),
}


def plan(kind, pattern, arrays, **options):
    """The tiling or the shifts of a call; None if the general loop computes it."""
    sizes = {"num_queries": arrays[0].shape[1], "num_keys": arrays[1].shape[1]}
    options = {"is_causal": False} | options
    return kind.of(PatternCall(pattern=pattern, scale=1.0, **sizes, **options), *arrays[:2])


@pytest.mark.parametrize("name", slow_unless(WINDOWS, ("ends in a tile", "both sides, ends in a tile")))
def test_tiles_equal_oracle(name):
    length, left, right, is_causal, tiling = WINDOWS[name]
    arrays = random_qkv(length, batch=1)
    chosen = plan(WindowTiling, SlidingWindow(left, right), arrays, is_causal=is_causal)
    assert (chosen.tile, chosen.before, chosen.gap) == tiling
    got = run(*arrays, local_window_size=(left, right), is_causal=is_causal)
    visible = oracles.pairs(length, length, oracles.sliding(left, right), is_causal=is_causal)
    assert_close(got, expect(arrays, visible), 1e-5)


@pytest.mark.parametrize("name", slow_unless(GRIDS, ("ragged", "causal", "wider than the row")))
def test_shifts_equal_oracle(name):
    length, width, rows, columns, is_causal, key_offset, count = GRIDS[name]
    arrays = random_qkv(length, batch=2)
    pattern, options = Neighbourhood(width, rows, columns), {"is_causal": is_causal, "key_offset": key_offset}
    assert len(plan(GridShifts, pattern, arrays, **options).offsets) == count
    sees = oracles.neighbourhood(width, rows, columns)
    visible = oracles.pairs(length, length, sees, key_offset, key_offset, is_causal=is_causal)
    assert_close(run(*arrays, pattern=pattern, **options), expect(arrays, visible), 1e-5)


@pytest.mark.parametrize(("right", "is_causal"), slow_unless([(0, True), (20, False)], (0,)))
def test_lengths_segments_and_head_groups_in_tiles(right, is_causal):
    """NaN in padding, packed rows, and more heads than one step processes."""
    arrays = random_qkv(400, batch=2, heads=24, kv_heads=12)
    pattern, sees = SlidingWindow(150, right), oracles.sliding(150, right)
    assert plan(WindowTiling, pattern, arrays, is_causal=is_causal).heads < 12
    ids = np.sort(np.random.default_rng(1).integers(0, 3, (2, 400)), -1).astype(np.int32)
    (_, key, value, _), lengths, visible = with_padding(arrays, [400, 400], [400, 261])
    visible = visible & oracles.pairs(400, 400, sees, is_causal=is_causal)
    visible = visible & (ids[:, None, :, None] == ids[:, None, None])
    options = {"pattern": pattern, "is_causal": is_causal, "segment_ids": jnp.asarray(ids)}
    got = run(
        arrays[0], key, value, arrays[3], key_value_seq_lengths=lengths["key_value_seq_lengths"], **options
    )
    assert_close(got, expect(arrays, visible), 1e-5)


def test_lengths_and_head_groups_by_shifts():
    """NaN in padding, and query heads that share a key head."""
    arrays = random_qkv(203, batch=2, heads=6, kv_heads=2)
    (_, key, value, _), lengths, visible = with_padding(arrays, [203, 203], [203, 117])
    key_lengths = lengths["key_value_seq_lengths"]
    got = run(
        arrays[0], key, value, arrays[3], pattern=Neighbourhood(20, 1, 2), key_value_seq_lengths=key_lengths
    )
    visible = visible & oracles.pairs(203, 203, oracles.neighbourhood(20, 1, 2))
    assert_close(got, expect(arrays, visible), 1e-5)


@pytest.mark.parametrize(
    ("pattern", "length", "places"),
    [
        (SlidingWindow(99, 0), 700, (0, 63, 64, 511, 640, 699)),
        (Neighbourhood(20, 2, 2), 203, (0, 19, 20, 41, 202)),
    ],
    ids=["tiles", "shifts"],
)
def test_causal_bitwise(pattern, length, places):
    """In every block and step."""
    attend = functools.partial(local_attention, pattern=pattern, is_causal=True)
    check_causal(attend, random_qkv(length, batch=1), places)


@pytest.mark.parametrize(
    ("pattern", "sees", "length", "is_causal"),
    [
        (SlidingWindow(40, 40), oracles.sliding(40, 0), 500, True),
        (Neighbourhood(12, 1, 1), oracles.neighbourhood(12, 1, 1), 144, False),
    ],
    ids=["tiles", "shifts"],
)
def test_large_logits_and_half_precision(pattern, sees, length, is_causal):
    query, key, value, d_out = random_qkv(length, batch=1)
    visible, options = oracles.pairs(length, length, sees), {"pattern": pattern, "is_causal": is_causal}
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
    assert plan(WindowTiling, SlidingWindow(left, 0), random_qkv(length, batch=1), is_causal=True) is None, (
        why
    )


def test_grids_left_to_the_general_loop():
    arrays = random_qkv(203, batch=1)
    small = Neighbourhood(20, 1, 1)
    assert plan(GridShifts, small, arrays) is not None
    assert plan(GridShifts, SlidingWindow(20, 20), arrays) is None
    assert (
        plan(GridShifts, Neighbourhood(20, 3, 9), arrays) is None
    )  # a dense window gains nothing from shifts
    assert plan(GridShifts, small, arrays, query_offset=3) is None
    assert plan(GridShifts, small, arrays, key_offset=None) is None
    assert plan(GridShifts, small, [arrays[0][:, 1:], arrays[1]]) is None
    assert plan(GridShifts, small, [jnp.zeros((1, 203, 4, 64)), arrays[1]]) is None
