"""Properties of all attention functions with a recurrent state: pieces, padding, packing and long input."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import brl_jax
from tests.marks import slow_unless
from tests.support.attention import close, random_qkv
from tests.support.states import CASES, LONG, at_once

#: The mechanisms with a state, apart from those whose states are tokens.
NAMES = [
    name for name in CASES if name.split(",")[0] not in ("local", "diag", "flowformer", "mlr", "long_short")
]
PACKING = [name for name in NAMES if name.split(",")[0] not in ("gau", "flash", "bsbr")]
LINEAR = [name for name in NAMES if name.split(",")[0] not in ("gau", "bsbr")]


def inputs(length, **sizes):
    return random_qkv(length, **sizes)[:3]


def extended(name, query, key, value, state=None, **options):
    """The outputs and the state after more tokens."""
    functions = CASES[name].functions(name, **LONG.get(name, {}))
    state = functions.init(query.shape[0], key.shape[2], query.shape[3]) if state is None else state
    gates = jax.lax.stop_gradient(CASES[name].more(query, key, value))
    return functions.extend(query, key, value, state, **gates, **options)


@functools.cache
def compiled(name: str) -> Callable[..., Any]:
    """`extended` as one compiled program for all arrays of a shape; options may be arrays."""
    return jax.jit(functools.partial(extended, name))


# Fast: a sum of outer products, the delta rule's triangular systems, without and with removal keys, and a state with
# keys. tests/laws checks pieces and packing of layers of every kind.
each_engine = pytest.mark.parametrize("name", slow_unless(NAMES, ("linear", "deltanet", "rwkv7", "bsbr")))
# One chunk after the other, and all at once.
each_form = pytest.mark.parametrize("platform", slow_unless(["cpu", "cuda"], ("cpu",)), indirect=True)


@each_form
@each_engine
def test_pieces_of_any_size_continue_the_state(name, platform):
    """2,000 tokens in pieces of 1, 7, 64, 1,000 and the rest give the outputs and the state of a single call."""
    arrays, run = inputs(2000), compiled(name)
    expected, expected_state = run(*arrays)
    state, start, outputs = None, 0, []
    for size in (1, 7, 64, 1000, 928):
        out, state = run(*(x[:, start : start + size] for x in arrays), state=state)
        outputs.append(out)
        start += size
    close(jnp.concatenate(outputs, axis=1), expected)
    jax.tree.map(close, state, expected_state)


@each_form
@each_engine
def test_padding_leaves_no_trace(name, platform):
    """NaN after a row's end reaches neither its outputs nor the state nor any gradient."""
    run = compiled(name)
    arrays = inputs(150, seed=1)
    lengths = jnp.array([150, 70])

    @jax.jit
    def all_of_it(*arrays):
        """The outputs, the state and the gradients of the existing tokens in the second row."""

        def loss(*arrays):
            out, state = extended(name, *arrays, key_value_seq_lengths=lengths)
            return jnp.sum(out[1, :70] ** 2), (out, state)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)

    gradients, (out, state) = all_of_it(*(x.at[1, 70:].set(jnp.nan) for x in arrays))
    alone, alone_state = run(*(x[1:, :70] for x in arrays))
    close(out[1:, :70], alone)
    close(out[:1], run(*(x[:1] for x in arrays))[0])
    jax.tree.map(lambda a, b: close(a[1:], b), state, alone_state)
    for gradient, clean in zip(gradients, all_of_it(*arrays)[0]):
        assert bool(jnp.isfinite(gradient).all())
        close(gradient, clean)


@pytest.mark.parametrize("platform", ["cpu", "cuda"], indirect=True)
@pytest.mark.parametrize("name", slow_unless(PACKING, ("linear", "deltanet", "rwkv7")))
def test_segments_are_apart(name, platform):
    """A segment gives the same as alone. The given state precedes the first segment; the returned one follows the
    last. Gradients flow through both."""
    arrays, more = inputs(200, seed=2, batch=1), inputs(3, seed=6, batch=1)
    cuts = [0, 3, 68, 200]
    ids = np.zeros((1, 200), np.int32)
    for number, (a, b) in enumerate(itertools.pairwise(cuts)):
        ids[:, a:b] = (5, 1, 5)[number]

    def together(state, *arrays):
        out, state = extended(name, *arrays, segment_ids=jnp.asarray(ids), state=state)
        return jnp.concatenate([out, extended(name, *more, state=state)[0]], axis=1)

    def apart(state, *arrays):
        outs = []
        for a, b in itertools.pairwise(cuts):
            out, state = extended(name, *(x[:, a:b] for x in arrays), state=state if a == 0 else None)
            outs.append(out)
        return jnp.concatenate([*outs, extended(name, *more, state=state)[0]], axis=1)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function, past, *arrays):
        def loss(past, *arrays):
            out = function(extended(name, *past)[1], *arrays)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=range(4), has_aux=True)(past, *arrays)

    past = inputs(20, seed=3, batch=1)
    for got, expected in zip(*(jax.tree.leaves(with_gradients(f, past, *arrays)) for f in (together, apart))):
        close(got, expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_64k_tokens_in_bfloat16(name):
    """The state keeps its precision: the last tokens' outputs match float32."""
    run = jax.jit(at_once(name))
    arrays = [x.astype(jnp.bfloat16) for x in inputs(2**16, batch=1, seed=4)]
    out = run(*arrays)
    assert out.dtype == jnp.bfloat16
    close(out[:, -1000:], run(*(x.astype(jnp.float32) for x in arrays))[:, -1000:], 4e-3)


@each_engine
def test_devices_share_heads_under_shard_map(name):
    """Loops whose state starts at zeros pass shard_map's checks of varying axes."""
    arrays = inputs(130, seed=5, batch=1)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, None, "heads")
    shared = jax.shard_map(at_once(name), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    close(jax.jit(shared)(*arrays), jax.jit(at_once(name))(*arrays))


@pytest.mark.parametrize("is_causal", slow_unless([True, False], (True,)))
def test_bsbr_clamps_lengths_beyond_the_sequence(is_causal):
    query, key, value = inputs(70, seed=9)
    call = jax.jit(
        functools.partial(
            brl_jax.bsbr_attention, query, key, value, query, key, is_causal=is_causal, chunk_size=32
        )
    )
    close(call(key_value_seq_lengths=jnp.array([70, 500])), call())


@pytest.mark.parametrize("name", slow_unless(["delta", "mlr", "diag"], ("delta",)))
def test_gradients_of_replicated_keys_under_shard_map(name):
    """Queries are sharded and keys replicated, so the gradient of keys is summed over devices."""
    arrays = inputs(40, seed=10, batch=1, heads=2, kv_heads=1)
    function = {
        "delta": at_once("deltanet"),
        "mlr": functools.partial(brl_jax.mlr_attention, ranks=(4, 4)),
        "diag": functools.partial(brl_jax.diag_attention, block_size=16),
    }[name]
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec(None, None, "heads"), PartitionSpec()
    shared = jax.shard_map(function, mesh=mesh, in_specs=(split, whole, whole), out_specs=split)

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(function(*a) ** 2), argnums=(0, 1, 2)))(*arrays)

    for got, expected in zip(gradients(shared), gradients(function)):
        close(got, expected)
