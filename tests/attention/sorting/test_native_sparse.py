"""Native sparse attention: its kernel, packed rows and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import BlockSizes, compression_blocks, native_sparse_attention
from tests.oracles.attention import relative_error

SIZES = BlockSizes(compressed=4, stride=2, selected=4, blocks=5)


def arguments(length, batch=2, seed=0):
    """Queries, keys, values and gates."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 8), (batch, length, 4, 3))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def attend(query, key, value, gates, sizes=SIZES, segment_ids=None, **options):
    """Compresses blocks to their means."""
    blocks = (compression_blocks(x, sizes, segment_ids).mean(2) for x in (key, value))
    return native_sparse_attention(
        query, key, value, *blocks, gates, sizes=sizes, window=3, segment_ids=segment_ids, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_tpu_kernel_is_the_reference_too(packed):
    query, key, value, gates = arguments(70)
    segments = jnp.asarray(np.arange(70)[None] // [[31], [44]], jnp.int32) if packed else None

    def both(implementation):
        def loss(*arrays):
            out = attend(*arrays, segment_ids=segments, implementation=implementation)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(query, key, value, gates)

    expected, got = both("xla"), both("pallas_interpret")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert relative_error(x, y) < 1e-5


@pytest.mark.slow
def test_packed_sequences_are_alone_whatever_their_lengths():
    """Blocks begin where a sequence does; one of the sequences is shorter than a block."""
    lengths = (13, 2, 22)
    rows = [arguments(n, batch=1, seed=n) for n in lengths]
    packed = [jnp.concatenate(parts, axis=1) for parts in zip(*rows)]
    ids = jnp.asarray(np.repeat((7, -1, 7), lengths)[None], jnp.int32)

    def loss(arrays, ids=None):
        return jnp.sum(jnp.square(attend(*arrays, segment_ids=ids))), attend(*arrays, segment_ids=ids)

    both = jax.jit(jax.grad(loss, has_aux=True))
    gradient, out = both(packed, ids)
    alone = [both(row) for row in rows]
    for i, whole in enumerate((*gradient, out)):
        expected = jnp.concatenate([(*grad, y)[i] for grad, y in alone], axis=1)
        assert relative_error(whole, expected) < 1e-5


@pytest.mark.slow
def test_memory_is_linear():
    def temporary(length):
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: arguments(length))]
        run = jax.jit(jax.grad(lambda *x: attend(*x, sizes=BlockSizes(8, 4, 16, 6)).sum(), (0, 1, 2, 3)))
        return run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384) <= 2.2 * temporary(8192)
