"""Packed rows of BRL attention: each sequence has the same blocks and outputs as alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BRLConfig
from brl_jax.layers.compressed.packing import PackedBlocks
from brl_jax.models import Stack
from tests.laws.cases import dimensions
from tests.laws.networks import relative_error
from tests.support.parameters import drawn


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


@pytest.mark.slow  # law 4 has two sequences
def test_many_sequences_in_a_row_are_each_alone():
    """Outputs and gradients, with a bias that not only softmax takes, and a memory that packed rows do not read."""
    sizes = (1, 8, 9, 3, 17, 2)
    mechanism = BRLConfig(
        window=3, num_compressed=3, block_size=4, history_size=6, score="laplace", bias="alibi", gamma=0.5
    )
    stack = Stack((mechanism,) * 2, dimensions(True))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, sum(sizes), 16)).astype(np.float32)
    weight = rng.standard_normal(x.shape).astype(np.float32)
    variables = drawn(stack.init, x[:, :1])
    # Later sequences don't affect earlier ones.
    cuts = np.cumsum(sizes)[:-1]
    rows, weights = (
        np.concatenate([np.pad(part, ((0, 0), (0, max(sizes) - part.shape[1]), (0, 0))) for part in parts])
        for parts in (np.split(a, cuts, axis=1) for a in (x, weight))
    )

    @jax.jit
    def both(variables, x, weight, segment_ids, memory):
        def weighted(variables, x):
            y = stack.apply(variables, x, segment_ids=segment_ids, cache=memory)[0]
            return jnp.sum(y * weight), y

        return jax.grad(weighted, argnums=(0, 1), has_aux=True)(variables, x)

    (alone, alone_x), expected = both(variables, rows, weights, None, None)
    memory = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), stack.init_memory(1))
    (together, together_x), y = both(variables, x, weight, jnp.asarray(ids_of(sizes))[None], memory)

    def in_a_row(a):
        return np.concatenate([a[i, :size] for i, size in enumerate(sizes)])

    # Both sum in float32, in another order, and processors round differently: up to 1.2e-5.
    assert relative_error(y[0], in_a_row(expected)) < 2e-5
    assert relative_error(together_x[0], in_a_row(alone_x)) < 1e-4
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert relative_error(a, b) < 1e-4
