"""Packed rows of BRL attention: each sequence has the same blocks as alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers.compressed.packing import PackedBlocks


def ids_of(sizes):
    """Ids of a row of sequences with these lengths; neighbours differ."""
    return np.concatenate([np.full(size, 7 * (i % 3), np.int32) for i, size in enumerate(sizes)])


def blocks_of(sizes, block):
    """The tokens of each further block, the tokens of the block that it follows, and its place in its sequence."""
    found, start = [], 0
    for size in sizes:
        for first in range(block, size, block):
            own = list(range(start + first, start + min(first + block, size)))
            found.append((own, list(range(start + first - block, start + first)), first))
        start += size
    return found


@pytest.mark.parametrize("block", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 8))])
def test_the_blocks_of_a_row(block):
    """Against a walk over the sequences: short ones, whole blocks, a single one, one that fills every set."""
    rows = [(5, 1, 8, 2, 8), (24,), (1,) * 24, (9, 9, 6), (16, 8), (7, 17)]
    ids = jnp.asarray([ids_of(sizes) for sizes in rows])
    x = np.arange(1.0, 25.0)[None, :, None] + 100 * np.arange(6.0)[:, None, None]
    x = jnp.asarray(x, jnp.float32)
    number = -(-24 // block) - 1

    @jax.jit
    def run(ids, x):
        packed = PackedBlocks.of(ids, block)
        further = packed.further(x, block)
        fields = packed.before, packed.is_first, packed.place
        return packed.sources(x, block), further, packed.back(further, block), *fields

    source, further, back, befores, is_first, place = run(ids, x)
    assert source.shape == further.shape == (6, number * block, 1)
    for row, sizes in enumerate(rows):
        found = blocks_of(sizes, block)
        assert len(found) <= number
        expected = np.zeros((2, number, block))
        before = np.zeros(number + 1, int)
        for j, (own, read, first) in enumerate(found):
            expected[0, j, : len(own)] = x[row, own, 0]
            expected[1, j] = x[row, read, 0]
            before[j + 1] = first
        np.testing.assert_array_equal(further[row].reshape(number, block), expected[0])
        np.testing.assert_array_equal(source[row].reshape(number, block), expected[1])
        np.testing.assert_array_equal(befores[row], before)
        kept = np.isin(np.arange(24), [t for own, *_ in found for t in own])
        np.testing.assert_array_equal(back[row, :, 0], np.where(kept, x[row, :, 0], 0.0))
        np.testing.assert_array_equal(is_first[row], ~kept)
        offset = np.concatenate([np.arange(size) for size in sizes])
        np.testing.assert_array_equal(place[row], offset % block)
