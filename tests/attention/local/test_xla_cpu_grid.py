"""Two-dimensional windows by shifts (the CPU's path) against the float64 oracle.

The grids have an incomplete last row, margins between heads that a wrong offset would cross, and windows as wide as a
row, for which two cells of the window have the same distance in the sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import local_attention
from brl_jax.attention.local.call import PatternCall
from brl_jax.attention.local.patterns import Neighbourhood, SlidingWindow
from brl_jax.attention.local.xla_cpu_grid import GridShifts
from tests.attention.local.cases import run
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, random_qkv

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


def make_call(pattern, is_causal, arrays, key_offset=0):
    num_queries, num_keys = (x.shape[1] for x in arrays[:2])
    return PatternCall(
        pattern=pattern,
        is_causal=is_causal,
        scale=1.0,
        num_queries=num_queries,
        num_keys=num_keys,
        key_offset=key_offset,
    )


@pytest.mark.parametrize("name", slow_unless(GRIDS, ("ragged", "causal", "wider than the row")))
def test_shifts_equal_oracle(name):
    length, width, rows, columns, is_causal, key_offset, count = GRIDS[name]
    arrays = random_qkv(length, batch=2)
    pattern = Neighbourhood(width, rows, columns)
    shifts = GridShifts.of(make_call(pattern, is_causal, arrays, key_offset), *arrays[:2])
    assert len(shifts.offsets) == count
    got = run(*arrays, pattern=pattern, is_causal=is_causal, key_offset=key_offset)
    sees = oracles.neighbourhood(width, rows, columns)
    visible = oracles.pairs(
        length, length, lambda i, j: sees(i + key_offset, j + key_offset), is_causal=is_causal
    )
    assert_close(got, expect(arrays, visible), 1e-5)


def test_lengths_and_head_groups():
    """NaN in padding, and query heads that share a key head."""
    length, pattern = 203, Neighbourhood(20, 1, 2)
    arrays = random_qkv(length, batch=2, heads=6, kv_heads=2)
    lengths = np.array([203, 117])
    inside = np.arange(length) < lengths[:, None]
    visible = oracles.pairs(length, length, oracles.neighbourhood(20, 1, 2)) & inside[:, None, None, :]
    query, key, value, d_out = arrays
    key, value = (jnp.where(inside[..., None, None], x, jnp.nan) for x in (key, value))
    got = run(query, key, value, d_out, pattern=pattern, key_value_seq_lengths=jnp.asarray(lengths))
    assert_close(got, expect(arrays, visible), 1e-5)


def test_causal_bitwise():
    query, key, value, _ = random_qkv(203, batch=1)
    pattern = Neighbourhood(20, 2, 2)
    attend = jax.jit(lambda k, v: local_attention(query, k, v, pattern=pattern, is_causal=True))
    before = attend(key, value)
    for changed in (0, 19, 20, 41, 202):
        after = attend(key.at[:, changed].set(7.0), value.at[:, changed].set(7.0))
        np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
        assert (after[:, changed] != before[:, changed]).any()


def test_large_logits_and_half_precision():
    query, key, value, d_out = random_qkv(144, batch=1)
    pattern, sees = Neighbourhood(12, 1, 1), oracles.neighbourhood(12, 1, 1)
    visible = oracles.pairs(144, 144, sees)
    arrays = (query * 1e3, key, value, d_out)
    assert_close(run(*arrays, pattern=pattern)[:1], expect(arrays, visible)[:1], 1e-5)
    half = [x.astype(jnp.bfloat16) for x in (query, key, value, d_out)]
    got = run(*half, pattern=pattern)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(got, expect([x.astype(jnp.float32) for x in half], visible), 1e-2)


def test_left_to_the_general_loop():
    arrays = random_qkv(203, batch=1)

    def shifts(pattern, query=arrays[0], **changes):
        call = dataclasses.replace(make_call(pattern, False, arrays), **changes)
        return GridShifts.of(call, query, arrays[1])

    assert shifts(Neighbourhood(20, 1, 1)) is not None
    assert shifts(SlidingWindow(20, 20)) is None
    assert shifts(Neighbourhood(20, 3, 9)) is None  # a dense window gains nothing from shifts
    assert shifts(Neighbourhood(20, 1, 1), query_offset=3) is None
    assert shifts(Neighbourhood(20, 1, 1), key_offset=None) is None
    assert shifts(Neighbourhood(20, 1, 1), query=arrays[0][:, 1:]) is None
    assert shifts(Neighbourhood(20, 1, 1), query=jnp.zeros((1, 203, 4, 64))) is None
