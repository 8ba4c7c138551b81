"""Full and Hopfield attention on several devices: one device's numbers, equal work, and no device holds a whole row.

Either keys travel around the devices that share a row, or queries are divided if there are few keys. Through XLA, since
Pallas cannot interpret a kernel that reads scalars inside `jax.shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.attend import MANY_TOKENS
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.dense.hopfield import hopfield_attention
from tests.marks import slow_unless
from tests.support import meshes
from tests.support.attention import pulled, random_qkv
from tests.support.collectives import collectives
from tests.support.meshes import check_equal, check_prefix

pytestmark = pytest.mark.xdist_group("devices")
ROWS = P("rows", "shard")


def mesh(devices):
    shape = (8 // devices, devices)
    return Mesh(np.array(jax.devices()).reshape(shape), ("rows", "shard"), axis_types=(AxisType.Auto,) * 2)


def packed(length):
    """Segments that end inside a device's tokens, at a device's last token, or several devices later."""
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
    """Functions of query, key, value and sinks on one device and on the mesh, their arguments, and the cotangent of
    their output."""
    *arrays, d_out = random_qkv(length, num_keys, batch=8, dtype=dtype)
    arrays[0] = arrays[0] * jnp.asarray(magnitude, dtype)
    ids = packed(length) if segments else None
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)

    def local(query, key, value, sinks, ids, lengths):
        given = {"axis_name": "shard", "is_causal": is_causal, "key_value_seq_lengths": lengths}
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

    def alone(query, key, value, *sinks):
        given = {"is_causal": is_causal, "segment_ids": ids, "key_value_seq_lengths": lengths, **options}
        if steps is not None:
            return hopfield_attention(query, key, value, steps=steps, **given)
        return full_attention(query, key, value, sinks=sinks[0] if sinks else None, **given)

    given = [] if sinks is None else [jnp.asarray(sinks, jnp.float32)]
    return alone, on_mesh, (*arrays, *given), d_out


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
    "both ways, odd parts, packed, padded": {
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
    """The output and the gradients of a case on one device and on the mesh."""
    *functions, arguments, d_out = case(**CASES[name])
    return [[np.asarray(x, np.float32) for x in pulled(each, d_out, *arguments)] for each in functions]


def after(place, steps=None):
    """The outputs of a causal case, and of the same case with the tokens from `place` on replaced."""
    _, function, (query, key, value), _ = case(devices=4, length=48, steps=steps)
    function = jax.jit(function)
    other = [x.at[:, place:].set(-1e4 if i else 50.0) for i, x in enumerate((query, key, value))]
    return [np.asarray(function(*x)) for x in ((query, key, value), other)]


def moved(**settings):
    """(operation, elements) that each collective brings to one of 4 devices, in the program of 4,096 tokens with
    gradients."""
    _, function, arguments, d_out = case(devices=4, length=32, **settings)

    def both(arguments, d_out):
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(d_out)

    def shape(x):
        sharding = NamedSharding(mesh(4), ROWS)
        return jax.ShapeDtypeStruct((8, 4096, *x.shape[2:]), x.dtype, sharding=sharding)

    return collectives(jax.jit(both).lower(tuple(map(shape, arguments)), shape(d_out)).compile())


def work():
    """For each of 8 devices with 12 tokens and each round: how many pairs of a query and a key are multiplied, and how
    many of those are visible."""
    half = 6
    ring = sharded.Ring("shard", True)

    def local():
        here = jax.lax.axis_index("shard")
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

    return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh(8), in_specs=(), out_specs=P("shard")))())


def shared_queries(is_causal, function=full_attention, **options):
    """Output and gradients on one device and on the mesh."""
    *arrays, d_out = random_qkv(MANY_TOKENS, batch=2)
    ids = jnp.asarray(np.sort(np.random.default_rng(3).integers(0, 3, (2, MANY_TOKENS))))
    lengths = jnp.array([MANY_TOKENS - 10, MANY_TOKENS])

    def both(attend):
        options = {"is_causal": is_causal, "segment_ids": ids, "key_value_seq_lengths": lengths}
        return [np.asarray(x) for x in pulled(functools.partial(attend, **options), d_out, *arrays)]

    expected = both(functools.partial(function, implementation="xla", **options))
    with jax.set_mesh(meshes.mesh()):
        return expected, both(functools.partial(function, **options))


QUERIES = {
    "causal": functools.partial(shared_queries, True),
    "both ways, sinks": functools.partial(shared_queries, False, sinks=jnp.array([0.5, -1.0, 2.0, 0.0])),
    "hopfield": functools.partial(shared_queries, True, hopfield_attention, steps=2),
}
PARTS = {name: functools.partial(compared, name) for name in CASES}
PARTS |= {f"after {place}": functools.partial(after, place) for place in (1, 17, 30)}
PARTS["after 17, hopfield"] = functools.partial(after, 17, steps=2)
MOVED = {"causal": {}, "both ways": {"is_causal": False}, "hopfield": {"steps": 2}}
PARTS |= {f"moved {name}": functools.partial(moved, **settings) for name, settings in MOVED.items()}
PARTS["work"] = work
PARTS |= {f"queries, {name}": part for name, part in QUERIES.items()}


FAST = ("hopfield", "causal", "causal, packed", "both ways, odd parts, packed, padded")


@pytest.mark.parametrize("name", slow_unless(CASES, FAST))
def test_results_and_gradients_equal_one_devices(result, name):
    check_equal(*result(name), 2e-2 if "bfloat16" in name else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUERIES)
def test_shared_queries_give_the_numbers_of_one_device(result, name):
    check_equal(*result(f"queries, {name}"), 2e-5)


@pytest.mark.parametrize("case", slow_unless(("1", "17", "30", "17, hopfield"), ("17",)))
def test_later_tokens_change_no_bit(result, case):
    check_prefix(*result(f"after {case}"), int(case.split(",")[0]))


def test_all_devices_do_the_same_visible_work_in_each_round(result):
    done, seen = np.moveaxis(result("work"), 2, 0)[::-1]
    assert (done == seen).all()
    assert (done == done[:1]).all()
    assert done.sum() == 96 * 97 // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_no_row_is_gathered(result, name):
    """Eight rows on two devices: a device has 1,024 tokens with 4 x 1,024 x 16 numbers of the keys; whole rows would
    have four times that."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"collective-permute"}
    assert max(elements for _, elements in found) <= 4 * 1024 * 32
