"""Patterns: which pairs they see, what they refuse, and that their parts cover each pair once."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.local.far_patterns import BigBird, BlockMask
from brl_jax.attention.local.parts import Extent
from brl_jax.attention.local.patterns import SlidingWindow
from tests.attention.local.cases import PATTERNS
from tests.marks import slow_unless
from tests.oracles import attention as oracles


@pytest.mark.parametrize("name", PATTERNS)
def test_visible_says_what_is_seen(name):
    """On NumPy ints and on JAX ints, by broadcasting."""
    pattern, sees = PATTERNS[name]
    positions = np.arange(130)
    expected = oracles.pairs(130, 130, sees)
    got = pattern.visible(positions[:, None], positions[None, :], 130)
    np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
    if name != "big_bird":
        traced = pattern.visible(jnp.asarray(positions)[:, None], jnp.asarray(positions)[None, :])
        np.testing.assert_array_equal(np.broadcast_to(traced, expected.shape), expected)


def covered(pattern, call, block):
    """How often each (query, key) pair is in one of the pattern's parts, with rules applied."""
    times = np.zeros((call.num_queries, call.num_keys), int)
    for part in pattern.parts(call, lambda width: block):
        for i in range(part.num_blocks):
            queries, keys = np.asarray(part.query_index(i)), np.asarray(part.key_index(i, call.num_keys))
            seen = np.ones((len(queries), len(keys)), bool)
            offset = call.key_offset or 0
            if part.rule is not None:
                seen = part.rule((queries + call.query_offset + offset)[:, None], (keys + offset)[None, :])
            inside = ((queries >= 0) & (queries < call.num_queries))[:, None]
            seen = seen & inside & ((keys >= 0) & (keys < call.num_keys))[None, :]
            if call.is_causal:
                seen = seen & ((queries + call.query_offset)[:, None] >= keys[None, :])
            rows, cols = np.nonzero(seen)
            np.add.at(times, (queries[rows], keys[cols]), 1)
    return times


@pytest.mark.parametrize("block", slow_unless([4, 16, 128], (16,)))
@pytest.mark.parametrize("name", PATTERNS)
def test_parts_cover_each_pair_once(name, block):
    """For query blocks of any size at any offsets, no pair is missing and none counts twice."""
    pattern, sees = PATTERNS[name]
    for num_queries, num_keys, query_offset, key_offset in (
        (130, 130, 0, 0),
        (9, 40, 31, 3),
        (25, 30, 0, 13),
    ):
        for causal in {False, pattern.causal_ok}:
            call = Extent(
                is_causal=causal,
                num_queries=num_queries,
                num_keys=num_keys,
                query_offset=query_offset,
                key_offset=key_offset,
            )
            if name == "big_bird":
                last = max(key_offset + num_keys, key_offset + query_offset + num_queries)
                sees = oracles.big_bird(8, 3, 1, pattern.random_lists(-(-last // 8)))
            expected = oracles.pairs(
                num_queries, num_keys, sees, query_offset + key_offset, key_offset, causal
            )
            np.testing.assert_array_equal(covered(pattern, call, block), expected.astype(int))


@pytest.mark.parametrize("name", [n for n in PATTERNS if PATTERNS[n][0].limits[0] is not None])
def test_limits_bound_what_is_seen(name):
    """The bounds are tight: some query sees that far, none sees farther."""
    pattern = PATTERNS[name][0]
    size = 700
    i, j = np.nonzero(pattern.visible(np.arange(size)[:, None], np.arange(size)[None, :]))
    assert ((i - j).max(), (j - i).max()) == pattern.limits


def test_width_of_the_papers():
    assert SlidingWindow.of_width(256, is_causal=True) == SlidingWindow(255, 0)
    assert SlidingWindow.of_width(256, is_causal=False) == SlidingWindow(128, 128)
    assert SlidingWindow.of_width(1, is_causal=False) == SlidingWindow(0, 0)
    for width in (0, -3, 2.5):
        with pytest.raises(ValueError, match=f"width must be .*, got {width}"):
            SlidingWindow.of_width(width, is_causal=True)


def test_patterns_are_hashable_values():
    assert hash(BlockMask.of(4, np.eye(3, dtype=bool))) == hash(BlockMask.of(4, np.eye(3, dtype=bool)))
    assert BlockMask.of(4, np.eye(3, dtype=bool)) != BlockMask.of(4, np.ones((3, 3), bool))
    assert len({BigBird(8), BigBird(8), BigBird(8, seed=1)}) == 2


def test_random_blocks_of_big_bird():
    """Distinct, not visible anyway, as many as requested if enough exist, and determined by the seed."""
    lists = BigBird(8, 3, 1, 3, seed=0).random_lists(20)
    for b, row in enumerate(lists):
        assert len(set(row)) == len(row) == (3 if b >= 1 else 0)
        assert all(abs(c - b) > 1 and c >= 1 for c in row)
    other = BigBird(8, 3, 1, 3, seed=1).random_lists(20)
    assert any(set(a) != set(b) for a, b in zip(lists, other))
    assert [len(row) for row in BigBird(8, 3, 1, 3).random_lists(4)] == [0, 1, 0, 1]
