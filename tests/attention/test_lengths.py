"""Padding, lengths beyond the tokens, and Luna's counts in rows with lengths and segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from tests.support.attention import close, pulled, random_qkv
from tests.support.calls import make_calls

CALLS = make_calls(10, head_dim=8)
#: Functions of query, key and value that take lengths without a direction.
NAMES = (
    "skyformer",
    "nystromformer",
    "informer",
    "sinkhorn",
    "linformer",
    "reformer",
    "kernelized",
    "flowformer",
    "full",
    "mlr",
)
CAUSAL = ("sinkhorn", "reformer", "flowformer", "full", "mlr")  # these calls are, unless asked otherwise
OF_QUERIES = ("full", "linformer", "kernelized", "mlr")  # these also take query lengths


def call_of(name, query, key, value, lengths=None):
    make, call = CALLS[name]
    options = {"key_value_seq_lengths": lengths}
    options |= {"query_seq_lengths": lengths} if name in OF_QUERIES else {}
    options |= {"is_causal": False} if name in CAUSAL else {}
    return call(query, key, value, *make(2)[3:], **options)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_beyond_the_tokens_mean_all_of_them(name):
    query, key, value = random_qkv(10)[:3]
    run = jax.jit(functools.partial(call_of, name, query, key, value))
    found = run(jnp.asarray([14, 7]))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, run(jnp.asarray([10, 7])))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [0, 3])
def test_padding_may_hold_anything(name, length):
    """NaN there reaches neither outputs nor gradients, which are 0 there; a row gives the same as alone."""
    *arrays, d_out = random_qkv(10)
    inside = jnp.arange(10)[None, :, None, None] < jnp.asarray([10, length])[:, None, None, None]

    call = functools.partial(call_of, name, lengths=jnp.asarray([10, length]))
    found = pulled(call, jnp.where(inside, d_out, 0), *(jnp.where(inside, x, jnp.nan) for x in arrays))
    for number, x in enumerate(found):
        assert np.isfinite(x).all()
        if number or name != "flowformer":  # its outputs in padding are arbitrary
            assert not np.asarray(jnp.where(inside, 0, x)).any()
    if length and name != "sinkhorn":  # its logits are for ten tokens
        alone = jax.jit(functools.partial(call_of, name))(*(x[1:, :length] for x in arrays))
        close(found[0][1:, :length], alone)


@pytest.mark.slow
def test_lunas_state_after_lengths_and_segments():
    arrays = [x[:2] for x in random_qkv(6, heads=2)[:3]]
    packed = jax.random.normal(jax.random.key(1), (3, *arrays[1].shape[2:]))
    ids = jnp.asarray([[0, 0, 1, 1, 1, 1]] * 2, jnp.int32)

    def state(ids, lengths=None):
        options = {"segment_ids": ids, "key_value_seq_lengths": lengths, "return_state": True}
        return brl_jax.luna_attention(*arrays, packed, **options)[1]

    for lengths, tokens in (([6, 6], [4, 4]), ([9, 3], [4, 1]), ([0, 2], [0, 2])):
        np.testing.assert_array_equal(state(ids, jnp.asarray(lengths)).length, tokens)
    np.testing.assert_array_equal(state(None, jnp.asarray([9, 3])).length, [6, 3])
    for a, b in zip(state(ids), state(ids, jnp.asarray([6, 6])), strict=True):
        np.testing.assert_array_equal(a, b)
