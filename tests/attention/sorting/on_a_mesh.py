"""Functions of whole rows that four of eight devices share, by heads; asked for by test_on_a_mesh.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from brl_jax import lsh_attention, lsh_rotations, prob_sparse_attention, slice_sort
from brl_jax.attention.core.whole_rows import by_heads
from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.collectives import collectives


@functools.cache
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=1, sequence=4))


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def lsh(query, value, lengths=None, **options):
    def of_rows(query, value, lengths, rotations):
        return lsh_attention(query, value, rotations, chunk_size=8, key_value_seq_lengths=lengths, **options)

    rotations = lsh_rotations(jax.random.key(0), query.shape[3], num_rounds=2, num_buckets=4)
    return by_heads(of_rows, (query, value), (lengths,), (rotations,))


def informer(query, key, value, **options):
    def of_rows(query, key, value, rng):
        return prob_sparse_attention(query, key, value, rng=rng, factor=2, **options)

    return by_heads(of_rows, (query, key, value), whole=(jax.random.key(1),))


def sliceformer(value):
    return by_heads(slice_sort, (value,))


def tokens(*heads, length=64):
    return [draw(2, length, n, 8, seed=seed) for seed, n in enumerate(heads)]


CASES = {
    "lsh": (functools.partial(lsh, is_causal=True), (4, 4)),
    "lsh, fewer heads than devices": (functools.partial(lsh, is_causal=True), (4, 2)),
    "lsh, one head, padded": (functools.partial(lsh, lengths=jnp.array([13, 64])), (1, 1)),
    "informer": (functools.partial(informer, is_causal=True), (4, 4, 4)),
    "informer, fewer heads than devices": (informer, (6, 2, 2)),
    "sliceformer": (sliceformer, (4,)),
}


def with_gradients(function):
    def both(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, *pull(out)

    return jax.jit(both)


def compared(name):
    """Output and gradients on one device and on the mesh."""
    function, heads = CASES[name]
    arrays = tokens(*heads)
    runs = [with_gradients(function)(*arrays)]
    with jax.set_mesh(mesh()):
        runs.append(with_gradients(function)(*arrays))
    return [[np.asarray(x) for x in run] for run in runs]


def moved(name):
    """(kind, elements) of what each collective in the program of 4,096 tokens brings to a device."""
    function, heads = CASES[name]
    sharding = NamedSharding(mesh(), PartitionSpec("data", "sequence"))
    arrays = [jax.ShapeDtypeStruct((2, 4096, n, 8), jnp.float32, sharding=sharding) for n in heads]
    with jax.set_mesh(mesh()):
        return collectives(with_gradients(function).lower(*arrays).compile())


PARTS = {name: functools.partial(compared, name) for name in CASES}
PARTS |= {f"moved {name}": functools.partial(moved, name) for name in ("lsh", "informer")}
