"""Full and Hopfield attention whose keys go around devices, for test_sharded.py, which asks for parts of it by name.

Through XLA: Pallas cannot interpret a kernel inside `jax.shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from brl_jax.attention.dense import sharded
from tests.support.attention import random_qkv
from tests.support.collectives import collectives

ROWS = P("rows", "stretch")


def mesh(devices):
    shape = (8 // devices, devices)
    return Mesh(np.array(jax.devices()).reshape(shape), ("rows", "stretch"), axis_types=(AxisType.Auto,) * 2)


def packed(length):
    """Segments that end inside stretches, at their borders, and that span several of them."""
    ids = np.zeros((8, length), np.int32)
    ids[0, length // 4 :] = 1
    ids[0, length // 4 + 3 :] = 2
    for row in range(1, 8):
        ids[row, row * length // 9 :] = 7
        ids[row, -row:] = -1
    return jnp.asarray(ids)


def case(
    devices, length, num_keys=None, is_causal=True, dtype="float32", segments=False, lengths=None, sinks=None,
    magnitude=1.0, steps=None, **options,
):  # fmt: skip
    """(function of query, key, value and sinks on the mesh, its arguments, the cotangent of its output)."""
    *arrays, d_out = random_qkv(length, num_keys, batch=8, dtype=dtype)
    arrays[0] = arrays[0] * jnp.asarray(magnitude, dtype)
    ids = packed(length) if segments else None
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)

    def local(query, key, value, sinks, ids, lengths):
        given = {"axis_name": "stretch", "is_causal": is_causal, "key_value_seq_lengths": lengths}
        given |= {"segment_ids": ids, **options}
        if steps is not None:
            return sharded.hopfield_attention(query, key, value, steps=steps, **given)
        return sharded.full_attention(query, key, value, sinks=sinks, **given)

    def on_mesh(query, key, value, *sinks):
        specs = (
            ROWS,
            ROWS,
            ROWS,
            P(),
            ROWS if ids is not None else P(),
            P("rows") if lengths is not None else P(),
        )
        function = jax.shard_map(local, mesh=mesh(devices), in_specs=specs, out_specs=ROWS)
        return function(query, key, value, sinks[0] if sinks else None, ids, lengths)

    return on_mesh, (*arrays, *([] if sinks is None else [jnp.asarray(sinks, jnp.float32)])), d_out


CASES = {
    "causal": {"devices": 4, "length": 32},
    "causal, eight devices": {"devices": 8, "length": 80},
    "causal, two devices": {"devices": 2, "length": 20},
    "causal, one device": {"devices": 1, "length": 10},
    "causal, packed": {"devices": 4, "length": 40, "segments": True},
    "causal, padded": {"devices": 4, "length": 40, "lengths": [0, 1, 5, 10, 11, 25, 39, 40]},
    "causal, sinks, cap": {
        "devices": 4, "length": 24, "sinks": [0.5, -1.0, 2.0, 0.0], "logits_soft_cap": 3.0, "scale": 0.7,
    },
    "causal, large scores": {"devices": 4, "length": 32, "magnitude": 100.0},
    "causal, bfloat16": {"devices": 4, "length": 64, "dtype": "bfloat16"},
    "both ways": {"devices": 4, "length": 20, "is_causal": False},
    "both ways, odd stretches, packed, padded": {
        "devices": 4, "length": 28, "is_causal": False, "segments": True, "lengths": [28, 0, 3, 7, 8, 21, 27, 28],
    },
    "across, padded, sinks": {
        "devices": 4, "length": 12, "num_keys": 36, "is_causal": False, "sinks": [0.5, -1.0, 2.0, 0.0],
        "lengths": [0, 1, 9, 10, 17, 30, 35, 36],
    },
    "hopfield": {"devices": 4, "length": 32, "steps": 2, "scale": 1.5},
    "hopfield, packed": {"devices": 4, "length": 40, "steps": 3, "segments": True},
    "hopfield, both ways, padded": {
        "devices": 4, "length": 20, "steps": 2, "is_causal": False, "lengths": [20, 0, 3, 7, 8, 11, 19, 20],
    },
    "hopfield, bfloat16": {"devices": 8, "length": 64, "steps": 2, "dtype": "bfloat16"},
    "both ways, bfloat16": {"devices": 8, "length": 64, "is_causal": False, "dtype": "bfloat16"},
}  # fmt: skip


def compared(name):
    """The output and the gradients of a case."""
    function, arguments, d_out = case(**CASES[name])

    @jax.jit
    def both(arguments, d_out):
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(d_out)

    return [np.asarray(x.astype(jnp.float32)) for x in both(arguments, d_out)]


def after(place, steps=None):
    """A causal case and the same with other tokens from `place` on."""
    function, (query, key, value), _ = case(devices=4, length=48, steps=steps)
    function = jax.jit(function)
    other = [x.at[:, place:].set(-1e4 if i else 50.0) for i, x in enumerate((query, key, value))]
    return [np.asarray(function(*x)) for x in ((query, key, value), other)]


def moved(**settings):
    """(operation, elements) of what each collective in the program of 4,096 tokens on 4 devices brings to one of them,
    with gradients."""
    function, arguments, d_out = case(devices=4, length=32, **settings)

    def both(arguments, d_out):
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(d_out)

    def shape(x):
        sharding = NamedSharding(mesh(4), ROWS)
        return jax.ShapeDtypeStruct((8, 4096, *x.shape[2:]), x.dtype, sharding=sharding)

    return collectives(jax.jit(both).lower(tuple(map(shape, arguments)), shape(d_out)).compile())


def work():
    """For each of 8 devices and each round, how many pairs of a query and a key its products are of, and how many of
    these pairs are visible, where each device has 12 tokens."""
    half = 6
    ring = sharded.Ring("stretch", True)

    def local():
        here = jax.lax.axis_index("stretch")
        parts = [np.array([2 * i, 15 - 2 * i]) * half for i in range(8)]
        starts = jnp.asarray(parts)

        def count(own, other, is_causal, there):
            queries = starts[here, own] + jnp.arange(half)
            keys = starts[there, other] + jnp.arange(half)
            seen = (queries[:, None] >= keys[None]).sum()
            return jnp.stack([seen, jnp.int32(half * (half + 1) // 2 if is_causal else half * half)])

        rounds = [0, *jnp.arange(1, 8)]
        counts = [
            sum(
                count(own, other, is_causal, (here - number) % 8)
                for own, other, is_causal in ring.pairs(number)
            )
            for number in rounds
        ]
        return jnp.stack(counts)[None]

    return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh(8), in_specs=(), out_specs=P("stretch")))())


PARTS = {name: functools.partial(compared, name) for name in CASES}
PARTS |= {f"after {place}": functools.partial(after, place) for place in (1, 17, 30)}
PARTS["after 17, hopfield"] = functools.partial(after, 17, steps=2)
MOVED = {"causal": {}, "both ways": {"is_causal": False}, "hopfield": {"steps": 2}}
PARTS |= {f"moved {name}": functools.partial(moved, **settings) for name, settings in MOVED.items()}
PARTS["work"] = work
