"""Mechanisms with a state on sequences shared by four devices: the same numbers as one device, and no row travels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import (
    RotaryBias,
    bsbr_attention,
    cosformer_attention,
    delta_rule,
    gated_delta_rule,
    gau_attention,
    init_delta_state,
    init_linear_state,
    linear_attention,
    mixed_chunk_attention,
    norm_attention,
    performer_attention,
)
from brl_jax.attention.recurrent.flowformer import flowformer_attention, init_flowformer_state
from brl_jax.attention.recurrent.luna import luna_attention
from brl_jax.attention.recurrent.performer import performer_projection
from tests.marks import slow_unless
from tests.support.meshes import after, check_equal, check_prefix, compared, draw, moved

pytestmark = pytest.mark.xdist_group("devices")
BATCH, HEADS, KV_HEADS, SIZE, CHUNK = 2, 4, 2, 8, 8


def tokens(length):
    return (
        draw(BATCH, length, HEADS, SIZE, seed=0),
        draw(BATCH, length, KV_HEADS, SIZE, seed=1),
        draw(BATCH, length, KV_HEADS, SIZE, seed=2),
    )


def scalars(length, seed=3):
    return jax.nn.sigmoid(draw(BATCH, length, KV_HEADS, seed=seed))


def features(length):
    return jax.nn.sigmoid(draw(BATCH, length, KV_HEADS, SIZE, seed=3))


def packed(length):
    """Segments that end inside a device's tokens, at a device's last token, or several devices later."""
    ids = np.zeros((BATCH, length), np.int32)
    for row, ends in enumerate(([length // 4, length // 4 + 3], [5, length // 2 + 9, length - 2])):
        for end in ends:
            ids[row, end:] += 1
    return jnp.asarray(ids)


def lengths(length):
    return jnp.array([length // 3, length], jnp.int32)


def _linear_state():
    state = init_linear_state(BATCH, KV_HEADS, SIZE, SIZE)
    return jax.tree.map(lambda x: 0.5 + 0.1 * draw(*x.shape, seed=7), state)


def _flow_state():
    state = init_flowformer_state(BATCH, HEADS, SIZE, SIZE)
    return jax.tree.map(lambda x: jnp.abs(draw(*x.shape, seed=7)).astype(x.dtype) * 3 + 1, state)


def _delta_state():
    return jax.tree.map(lambda x: draw(*x.shape, seed=7), init_delta_state(BATCH, KV_HEADS, SIZE, SIZE))


def delta(query, key, value, beta, **options):
    return delta_rule(query, key, value, beta=beta, **options)


def gated(query, key, value, beta, log_decay, **options):
    return gated_delta_rule(query, key, value, beta=beta, log_decay=-4 * log_decay, **options)


def decayed(query, key, value, decay, **options):
    return linear_attention(
        query, key, value, log_decay=-4 * decay, is_causal=True, normalize=False, **options
    )


def flash(query, key, value, **options):
    return mixed_chunk_attention(query, key, 0.5 * query, 0.5 * key, value, **options)


def bsbr(query, key, value, **options):
    return bsbr_attention(query, key, value, query[..., ::-1], key[..., ::-1], **options)


def performer(query, key, value, projection, **options):
    return performer_attention(query, key, value, projection=projection, **options)


def flow(query, key, value, **options):
    """The output, and the state without its token count."""
    out = flowformer_attention(query, key, value, **options)
    return (out[0], out[1]._replace(length=None)) if "state" in options else out


def gau(query, key, value, left, right, **options):
    """With a bias, which needs a key head for each query head."""
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    return gau_attention(query, key, value, bias=RotaryBias(left, right), **options)


def luna(query, key, value, packed, **options):
    return luna_attention(query, key, value, packed, **options)


def _vector(length):
    return draw(HEADS, SIZE, seed=8)


def _other_vector(length):
    return draw(HEADS, SIZE, seed=9)


def _packing(length):
    return draw(3, KV_HEADS, SIZE, seed=6)


def _case(function, *more, length=96, **options):
    options = {"chunk_size": CHUNK} | options
    operands = (*tokens(length), *(make(length) for make in more))
    return functools.partial(function, **options), operands


def _projection(length):
    return performer_projection(jax.random.key(0), 12, SIZE)


causal = functools.partial(_case, is_causal=True)
CASES = {
    "linear": lambda: causal(linear_attention),
    "linear, packed": lambda: causal(linear_attention, segment_ids=packed(96)),
    "linear, padded, from a state": lambda: causal(
        linear_attention, key_value_seq_lengths=lengths(96), state=_linear_state(), return_state=True
    ),
    "linear, a chunk each": lambda: causal(linear_attention, length=32),
    "linear, both directions, packed": lambda: _case(linear_attention, segment_ids=packed(96)),
    "linear, both directions": lambda: _case(linear_attention),
    "norm, rotated": lambda: causal(norm_attention, positions=jnp.arange(96)[None]),
    "cosformer, packed": lambda: causal(cosformer_attention, max_length=96, segment_ids=packed(96)),
    "performer, packed": lambda: causal(performer, _projection, segment_ids=packed(96)),
    "performer, padded": lambda: causal(performer, _projection, key_value_seq_lengths=lengths(96)),
    "delta": lambda: _case(delta, scalars),
    "delta, in chunks of a token": lambda: _case(delta, scalars, length=8, chunk_size=1),
    "delta, packed, from a state": lambda: _case(
        delta, scalars, segment_ids=packed(96), state=_delta_state(), return_state=True
    ),
    "gated delta, packed": lambda: _case(gated, scalars, scalars, segment_ids=packed(96)),
    "decay of a head and token, packed": lambda: _case(decayed, scalars, segment_ids=packed(96)),
    "decay of a feature and token": lambda: _case(decayed, features),
    "bsbr": lambda: causal(bsbr),
    "bsbr, both directions, padded": lambda: _case(bsbr, key_value_seq_lengths=lengths(96)),
    "flow": lambda: causal(flow),
    "flow, padded, from a state": lambda: causal(
        flow, key_value_seq_lengths=lengths(96), state=_flow_state(), return_state=True
    ),
    "luna": lambda: _case(luna, _packing),
    "luna, packed": lambda: _case(luna, _packing, segment_ids=packed(96)),
    "gau": lambda: causal(gau, _vector, _other_vector),
    "gau, packed": lambda: causal(gau_attention, segment_ids=packed(96)),
    "gau, packed, biased, both directions": lambda: _case(
        gau, _vector, _other_vector, segment_ids=packed(96)
    ),
    "gau, both directions, padded": lambda: _case(gau_attention, key_value_seq_lengths=lengths(96)),
    "gau, padded, in chunks of no divisor": lambda: causal(
        gau, _vector, _other_vector, key_value_seq_lengths=lengths(96), chunk_size=7
    ),
    "flash": lambda: causal(flash),
    "flash, padded": lambda: causal(flash, key_value_seq_lengths=lengths(96)),
}


# Their keys travel around the devices.
AROUND = ("gau", "gau, both directions, padded")
MOVED = ("linear", "decay of a feature and token", "performer, padded", "delta", "flow", "luna", "flash")


def _compared(name):
    function, operands = CASES[name]()
    return compared(function, *operands)


def _moved(name):
    function, operands = CASES[name]()
    return moved(function, *operands, length=96)


def _after(place):
    function, operands = CASES["gau"]()
    return after(function, place, operands[:3], *operands[3:])


PARTS = {name: functools.partial(_compared, name) for name in CASES}
PARTS |= {f"moved {name}": functools.partial(_moved, name) for name in (*MOVED, *AROUND)}
PARTS |= {f"after {place}": functools.partial(_after, place) for place in (13, 72)}


@pytest.mark.parametrize("name", slow_unless(CASES, ("linear, packed", "gau, packed")))
def test_results_and_gradients_equal_one_devices(result, name):
    check_equal(*result(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_states_travel_and_no_rows(result, name):
    """Four devices have 1,024 tokens each, with 16 numbers per key. A state has 128 to 256 numbers; 8 states are
    gathered."""
    collectives = result(f"moved {name}")
    assert any(kind == "all-gather" for kind, _ in collectives)
    assert max(elements for _, elements in collectives) <= 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_keys_go_around_and_no_row_is_gathered(result, name):
    """A device's 1,024 tokens have 4 heads of 16 key features, including a bias; a whole row has four times that."""
    collectives = result(f"moved {name}")
    assert "collective-permute" in {kind for kind, _ in collectives}
    assert max(elements for _, elements in collectives) <= 1024 * 4 * 16


@pytest.mark.slow
@pytest.mark.parametrize("place", [13, 72])
def test_later_tokens_change_no_bit(result, place):
    check_prefix(*result(f"after {place}"), place)
