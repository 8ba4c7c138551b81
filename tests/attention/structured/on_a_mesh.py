"""Structured scores on rows that four of eight devices share; asked for by test_on_a_mesh.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from brl_jax import bilinear_btt_attention, bilinear_mlr_attention, global_window_attention, mlr_attention
from brl_jax.attention.dense.full import MANY_TOKENS
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.sharding import MeshConfig, make_mesh
from tests.support.attention import random_qkv
from tests.support.collectives import collectives

LENGTH, WIDTH = MANY_TOKENS, 16


@functools.cache
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=1, sequence=4))


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def featured(length):
    """Query (of 4 heads), key (2) and value (1) of different features, and a cotangent."""
    sizes = ((4, 12), (2, 12), (1, 6), (4, 6))
    return [0.5 * draw(2, length, *size, seed=seed) for seed, size in enumerate(sizes)]


def packed():
    """Segments that end inside stretches, at their borders, and that span several of them."""
    ids = np.zeros((2, LENGTH), np.int32)
    ids[0, LENGTH // 4 :] = 1
    ids[1, 100:], ids[1, 700:] = 3, 4
    return jnp.asarray(ids)


FEATURES = {
    "causal": {"is_causal": True},
    "causal, packed": {"is_causal": True, "segment_ids": packed()},
    "both ways, padded": {
        "query_seq_lengths": jnp.array([LENGTH - 9, LENGTH]),
        "key_value_seq_lengths": jnp.array([LENGTH, 300]),
    },
}


def features(name):
    """The output of `feature_attention` on the mesh, and the gradients of query, key and value."""
    *arrays, d_out = featured(LENGTH)
    with jax.set_mesh(mesh()):

        @jax.jit
        def both(arrays, d_out):
            out, pull = jax.vjp(functools.partial(feature_attention, **FEATURES[name]), *arrays)
            return out, *pull(d_out)

        return [np.asarray(x) for x in both(arrays, d_out)]


def after(place):
    """A causal case, and the same with other tokens from `place` on."""
    arrays = featured(LENGTH)[:3]
    with jax.set_mesh(mesh()):
        function = jax.jit(functools.partial(feature_attention, is_causal=True))
        return [np.asarray(function(*(x.at[:, place:].add(more) for x in arrays))) for more in (0.0, 3.0)]


# Four devices have parts of 4 tokens of a causal row of 32, and of 8 tokens of another. Blocks have several parts, one
# part, and less.
MLR = {
    "causal": {"ranks": (2, 2, 1, 2, 1), "block_sizes": (None, 16, 8, 4, 2), "is_causal": True},
    "causal, divided": {
        "ranks": (4, 2, 2), "block_sizes": (16, 8, 2), "is_causal": True, "divide_by_levels": True,
    },
    "both ways, padded": {
        "ranks": (3, 3, 2), "block_sizes": (None, 16, 4), "key_value_seq_lengths": jnp.array([0, 19]),
        "query_seq_lengths": jnp.array([32, 30]),
    },
    "parts that blocks do not fit": {"ranks": (4, 4), "block_sizes": (None, 6), "is_causal": True},
}  # fmt: skip


def mlr(name):
    """Output and gradients of `mlr_attention` on the mesh."""
    *arrays, d_out = random_qkv(32)
    with jax.set_mesh(mesh()):

        @jax.jit
        def both(arrays, d_out):
            out, pull = jax.vjp(functools.partial(mlr_attention, **MLR[name]), *arrays)
            return out, *pull(d_out)

        return [np.asarray(x) for x in both(arrays, d_out)]


def mlr_after(place):
    arrays = random_qkv(32)[:3]
    with jax.set_mesh(mesh()):
        function = jax.jit(functools.partial(mlr_attention, **MLR["causal"]))
        return [np.asarray(function(*(x.at[:, place:].add(more) for x in arrays))) for more in (0.0, 3.0)]


def level_scores(x, value):
    query = x.reshape(*x.shape[:2], 4, 4)
    return mlr_attention(query, query[:, :, :2], value, ranks=(2, 1, 1), is_causal=True)


def bilinear_mlr(x, value):
    weights = [draw(blocks, WIDTH // blocks, 4, rank, seed=rank) / 4 for blocks, rank in ((1, 5), (2, 3))]
    return bilinear_mlr_attention(x, value, query_weights=weights, key_weights=weights, is_causal=True)


def bilinear_btt(x, value):
    right, left = draw(4, 4, 4, 4, 1, seed=5) / 2, draw(4, 4, 4, 4, 1, seed=6) / 2
    return bilinear_btt_attention(x, value, right=right, left=left, is_causal=True)


def global_window(x, value):
    query = x.reshape(*x.shape[:2], 4, 4)
    return global_window_attention(query, query[:, :, :2], value, ranks=(3, 1), window=9, is_causal=True)


FUNCTIONS = {
    "mlr": level_scores,
    "bilinear_mlr": bilinear_mlr,
    "bilinear_btt": bilinear_btt,
    "global_window": global_window,
}


def with_gradients(function):
    def both(x, value):
        out, pull = jax.vjp(function, x, value)
        return out, *pull(out)

    return jax.jit(both)


def compared(name):
    """Output and gradients on one device and on the mesh."""
    operands = draw(2, LENGTH, WIDTH, seed=8), draw(2, LENGTH, 2, 4, seed=9)
    runs = [with_gradients(FUNCTIONS[name])(*operands)]
    with jax.set_mesh(mesh()):
        runs.append(with_gradients(FUNCTIONS[name])(*operands))
    return [[np.asarray(x) for x in run] for run in runs]


def moved(name):
    """(kind, elements) of what each collective in the program of 4,096 tokens brings to a device."""
    sharding = NamedSharding(mesh(), PartitionSpec("data", "sequence"))
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape in ((2, 4096, WIDTH), (2, 4096, 2, 4))
    ]
    with jax.set_mesh(mesh()):
        return collectives(with_gradients(FUNCTIONS[name]).lower(*operands).compile())


PARTS = {f"features, {name}": functools.partial(features, name) for name in FEATURES}
PARTS |= {f"mlr, {name}": functools.partial(mlr, name) for name in MLR}
PARTS["mlr after"] = functools.partial(mlr_after, 21)
PARTS["after"] = functools.partial(after, 500)
PARTS |= {name: functools.partial(compared, name) for name in FUNCTIONS}
PARTS |= {f"moved {name}": functools.partial(moved, name) for name in FUNCTIONS}
