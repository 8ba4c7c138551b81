"""Properties of all attention functions with a recurrent state: pieces, padding, packing, long and bad input."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import brl_jax
from brl_jax.attention.core.biases import RotaryBias
from brl_jax.attention.recurrent.bsbr import init_bsbr_state
from brl_jax.attention.recurrent.cosformer import init_cosformer_state
from brl_jax.attention.recurrent.delta import init_delta_state
from brl_jax.attention.recurrent.gau import init_gau_state
from brl_jax.attention.recurrent.linear import init_linear_state
from brl_jax.attention.recurrent.luna import init_luna_state
from brl_jax.attention.recurrent.mixed_chunk import init_mixed_chunk_state
from brl_jax.attention.recurrent.performer import init_performer_state
from tests.marks import slow_unless
from tests.support.attention import close


class Case(NamedTuple):
    """A function of query (B, T, N, H), key and value (B, T, K, H), and its initial state."""

    call: Callable[..., Any]
    init: Callable[[int, int, int], Any]  # batch, key heads, head_dim
    packs: bool = True  # with a state
    linear: bool = True


def _delta(query, key, value, **options):
    beta = jax.lax.stop_gradient(jax.nn.sigmoid(3 * value[..., 0]))
    return brl_jax.delta_rule(query, key, value, beta=beta, **options)


def _gated_delta(query, key, value, **options):
    beta = jax.lax.stop_gradient(jax.nn.sigmoid(3 * value[..., 0]))
    log_decay = jax.lax.stop_gradient(-jnp.exp(2 * value[..., 1]))
    return brl_jax.gated_delta_rule(query, key, value, beta=beta, log_decay=log_decay, **options)


def _kimi_delta(query, key, value, **options):
    beta = jax.lax.stop_gradient(jax.nn.sigmoid(3 * value[..., 0]))
    log_decay = jax.lax.stop_gradient(-jnp.exp(2 * key))
    return brl_jax.kimi_delta_rule(query, key, value, beta=beta, log_decay=log_decay, **options)


def _gates(key, value):
    """The decay, and gates of the keys' and the values' shapes."""
    log_decay, gate, other = -jnp.exp(2 * key), jax.nn.sigmoid(3 * value), jax.nn.sigmoid(2 * key)
    return {"log_decay": jax.lax.stop_gradient(log_decay)}, *jax.lax.stop_gradient((gate, other))


def _gated_delta_2(query, key, value, **options):
    decay, erase, write = _gates(key, value)
    return brl_jax.gated_delta_rule_2(query, key, value, erase=erase, write=write, **decay, **options)


def _rwkv7(query, key, value, **options):
    decay, rate, _ = _gates(key, value)
    removal_key = key[..., ::-1]
    return brl_jax.rwkv7_attention(
        query, key, value, removal_key=removal_key, learning_rate=rate, **decay, **options
    )


def _linear(query, key, value, **options):
    return brl_jax.linear_attention(query, key, value, is_causal=True, **options)


def _head_decay(query, key, value, **options):
    log_decay = jnp.full(key.shape[2:3], -0.1)
    options |= {"normalize": False, "feature_map": "identity", "log_decay": log_decay}
    return brl_jax.linear_attention(query, key, value, is_causal=True, **options)


def _feature_decay(query, key, value, **options):
    log_decay = jax.lax.stop_gradient(-jnp.exp(3 * value[..., ::-1]))
    options |= {"normalize": False, "feature_map": "elu", "log_decay": log_decay}
    return brl_jax.linear_attention(query, key, value, is_causal=True, **options)


def _luna(query, key, value, **options):
    packed = jax.random.normal(jax.random.key(13), (3, *key.shape[2:]))
    return brl_jax.luna_attention(query, key, value, packed, **options)


def _norm(query, key, value, **options):
    return brl_jax.norm_attention(query, key, value, is_causal=True, **options)


def _cosformer(query, key, value, **options):
    return brl_jax.cosformer_attention(query, key, value, max_length=2**16, is_causal=True, **options)


def _performer(query, key, value, **options):
    rng = jax.random.key(11)
    return brl_jax.performer_attention(query, key, value, rng=rng, num_features=12, is_causal=True, **options)


def _bias(query):
    return RotaryBias(*jax.random.normal(jax.random.key(12), (2, query.shape[2], query.shape[3])) / 4)


def _gau(query, key, value, return_state=False, state=None, **options):
    if return_state and state is None:
        state = init_gau_state(key.shape[0], *key.shape[2:], value.shape[3], length=2048, dtype=key.dtype)
    options |= {"state": state, "return_state": return_state}
    return brl_jax.gau_attention(query, key, value, bias=_bias(query), is_causal=True, **options)


def _mixed_chunk(query, key, value, **options):
    options = {"chunk_size": 32, "bias": _bias(query), "is_causal": True} | options
    return brl_jax.mixed_chunk_attention(query, key, query[..., ::-1], -key, value, **options)


def _bsbr(query, key, value, return_state=False, state=None, **options):
    options = {"chunk_size": 32, "strength": 1 / 32} | options
    if return_state and state is None:
        state = init_bsbr_state(
            key.shape[0],
            *key.shape[2:],
            length=2048,
            num_heads=query.shape[2],
            chunk_size=32,
            dtype=key.dtype,
        )
    options |= {"state": state, "return_state": return_state}
    return brl_jax.bsbr_attention(query, key, value, query[..., ::-1], -key, is_causal=True, **options)


CASES = {
    "linear": Case(_linear, lambda b, k, h: init_linear_state(b, k, h, h)),
    "head_decay": Case(_head_decay, lambda b, k, h: init_linear_state(b, k, h, h, normalize=False)),
    "feature_decay": Case(_feature_decay, lambda b, k, h: init_linear_state(b, k, h, h, normalize=False)),
    "norm": Case(_norm, lambda b, k, h: init_linear_state(b, k, h, h, normalize=False)),
    "cosformer": Case(_cosformer, lambda b, k, h: init_cosformer_state(b, k, h, h)),
    "performer": Case(_performer, lambda b, k, h: init_performer_state(b, k, h, num_features=12)),
    "gau": Case(_gau, lambda b, k, h: init_gau_state(b, k, h, length=2048), packs=False, linear=False),
    "mixed_chunk": Case(
        _mixed_chunk, lambda b, k, h: init_mixed_chunk_state(b, k, h, h, chunk_size=32), packs=False
    ),
    "bsbr": Case(
        _bsbr,
        lambda b, k, h: init_bsbr_state(b, k, h, length=2048, num_heads=2 * k, chunk_size=32),
        packs=False,
        linear=False,
    ),
    "luna": Case(_luna, lambda b, k, h: init_luna_state(b, k, h, num_packed=3)),
    "delta": Case(_delta, lambda b, k, h: init_delta_state(b, k, h, h)),
    "gated_delta": Case(_gated_delta, lambda b, k, h: init_delta_state(b, k, h, h)),
    "kimi_delta": Case(_kimi_delta, lambda b, k, h: init_delta_state(b, k, h, h)),
    "gated_delta_2": Case(_gated_delta_2, lambda b, k, h: init_delta_state(b, k, h, h)),
    "rwkv7": Case(_rwkv7, lambda b, k, h: init_delta_state(b, k, h, h)),
}


def inputs(
    length: int, *, seed: int = 0, batch: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 8
):
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@functools.cache
def compiled(name: str, return_state: bool) -> Callable[..., Any]:
    """The case's call as one compiled program for all arrays of a shape; options may be arrays."""
    return jax.jit(functools.partial(CASES[name].call, return_state=return_state))


each = pytest.mark.parametrize("name", CASES)
# Fast: a sum of outer products, the delta rule's triangular systems, without and with removal keys, and a state with
# keys. tests/laws checks pieces
# and packing of layers of every kind.
each_engine = pytest.mark.parametrize("name", slow_unless(CASES, ("linear", "delta", "rwkv7", "bsbr")))


@each_engine
def test_pieces_of_any_size_continue_the_state(name):
    """2,000 tokens in pieces of 1, 7, 64, 1,000 and the rest give the outputs and the state of a single call."""
    arrays, run = inputs(2000), compiled(name, True)
    expected, expected_state = run(*arrays)
    state, start, outputs = CASES[name].init(2, 2, 8), 0, []
    for size in (1, 7, 64, 1000, 928):
        out, state = run(*(x[:, start : start + size] for x in arrays), state=state)
        outputs.append(out)
        start += size
    close(jnp.concatenate(outputs, axis=1), expected)
    jax.tree.map(close, state, expected_state)


@each_engine
def test_padding_leaves_no_trace(name):
    """NaN after a row's end reaches neither its outputs nor the state nor any gradient."""
    run = compiled(name, True)
    arrays = inputs(150, seed=1)
    lengths = jnp.array([150, 70])

    @jax.jit
    def all_of_it(*arrays):
        """The outputs, the state and the gradients of the existing tokens in the second row."""

        def loss(*arrays):
            out, state = CASES[name].call(*arrays, key_value_seq_lengths=lengths, return_state=True)
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


@pytest.mark.parametrize(
    "name", slow_unless([name for name, case in CASES.items() if case.packs], ("linear", "delta", "rwkv7"))
)
def test_segments_are_apart(name):
    """A segment gives the same as alone. The given state precedes the first segment; the returned one follows the
    last."""
    run = compiled(name, True)
    arrays = inputs(200, seed=2, batch=1)
    cuts = [0, 3, 68, 200]
    ids = np.zeros((1, 200), np.int32)
    for number, (a, b) in enumerate(itertools.pairwise(cuts)):
        ids[:, a:b] = (5, 1, 5)[number]
    _, before = run(*inputs(20, seed=3, batch=1))
    out, state = run(*arrays, segment_ids=jnp.asarray(ids), state=before)
    for a, b in itertools.pairwise(cuts):
        past = {"state": before} if a == 0 else {}
        expected, last = run(*(x[:, a:b] for x in arrays), **past)
        close(out[:, a:b], expected)
    more = inputs(3, seed=6, batch=1)  # reuses the program compiled for the first segment's shape
    close(run(*more, state=state)[0], run(*more, state=last)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.linear])
def test_64k_tokens_in_bfloat16(name):
    """The state keeps its precision: the last tokens' outputs match float32."""
    run = compiled(name, False)
    arrays = [x.astype(jnp.bfloat16) for x in inputs(2**16, batch=1, heads=1, kv_heads=1, seed=4)]
    out = run(*arrays)
    assert out.dtype == jnp.bfloat16
    close(out[:, -1000:], run(*(x.astype(jnp.float32) for x in arrays))[:, -1000:], 4e-3)


@each_engine
def test_devices_share_heads_under_shard_map(name):
    """Loops whose state starts at zeros pass shard_map's checks of varying axes."""
    case = CASES[name]
    arrays = inputs(130, seed=5, batch=1)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, None, "heads")
    shared = jax.shard_map(case.call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    close(jax.jit(shared)(*arrays), compiled(name, False)(*arrays))


@each
def test_bad_input(name):
    case = CASES[name]
    query, key, value = inputs(9)
    state = case.init(2, 2, 8)
    other = CASES["linear" if "delta" in name or name == "rwkv7" else "delta"].init(2, 2, 8)
    with_kernels = (
        "linear",
        "feature_decay",
        "head_decay",
        "norm",
        "cosformer",
        "delta",
        "gated_delta",
        "kimi_delta",
        "gated_delta_2",
        "rwkv7",
    )
    of_triton = "'triton' or 'triton_interpret'"
    implementations = "None or 'xla'"
    if name == "gau":
        implementations = f"None, 'xla', {of_triton}"
    elif name in with_kernels:
        implementations = f"None, 'xla', 'pallas', 'pallas_interpret', {of_triton}"
    wrong = {
        "chunk_size must be at least 1, got 0": {"chunk_size": 0},
        f"state must be of type {type(state).__name__}": {"state": other},
        r"state\.\w+ must be .*shape \(2, ": {"state": case.init(3, 2, 8)},
        r"key_value_seq_lengths must be ints of shape \(2,\)": {
            "key_value_seq_lengths": jnp.ones(3, jnp.int32)
        },
        f"implementation must be {implementations}, got 'cudnn'": {"implementation": "cudnn"},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            case.call(query, key, value, **options)
    with pytest.raises(ValueError, match="must have query's length 9"):
        case.call(query, key[:, :5], value[:, :5])


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
        "delta": _delta,
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


def test_positions_of_another_shape_are_refused():
    query, key, value = inputs(6)
    for keys, positions in ((6, jnp.arange(6)), (6, jnp.arange(7)[None]), (5, jnp.arange(6)[None])):
        with pytest.raises(ValueError, match=r"positions must have shape \(1, 6\) or \(2, 6\)"):
            brl_jax.linear_attention(query, key[:, :keys], value[:, :keys], positions=positions)


@pytest.mark.parametrize(("num_features", "head_dim"), [(0, 8), (4, 0), (2.5, 8)])
def test_projections_without_features_are_refused(num_features, head_dim):
    with pytest.raises(ValueError, match=r"must be (at least 1, got 0|an integer, got 2\.5)"):
        brl_jax.performer_projection(jax.random.key(0), num_features, head_dim)
