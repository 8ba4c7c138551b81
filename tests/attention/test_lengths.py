"""Padding, lengths beyond the tokens, and Luna's counts in rows with lengths and segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from tests.support.attention import close, pulled, random_qkv

SAMPLES = np.asarray([0.1, 0.9, 0.3, 0.95], np.float32)
LOGITS = np.random.default_rng(0).standard_normal((2, 3, 2, 3)).astype(np.float32)
PROJECTION = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
ROTATIONS = np.random.default_rng(2).standard_normal((2, 8, 2)).astype(np.float32)
# Functions of query, key and value; here 10 tokens with 4 heads and 2 key heads.
CALLS = {
    "skyformer": lambda *a, **o: brl_jax.skyformer_attention(*a, samples=SAMPLES, **o),
    "nystromformer": lambda *a, **o: brl_jax.nystromformer_attention(*a, num_landmarks=5, **o),
    "informer": lambda *a, **o: brl_jax.informer_attention(*a, rng=jax.random.key(0), factor=1, **o),
    "sinkhorn": lambda *a, **o: brl_jax.sinkhorn_attention(*a, LOGITS, block_size=4, **o),
    "linformer": lambda *a, **o: brl_jax.linformer_attention(
        *a, key_projection=PROJECTION, value_projection=-PROJECTION, **o
    ),
    "reformer": lambda q, k, v, **o: brl_jax.reformer_attention(q, v, ROTATIONS, chunk_size=3, **o),
    "kernelized": brl_jax.kernelized_attention,
    "flowformer": brl_jax.flowformer_attention,
    "full": brl_jax.full_attention,
}
OF_QUERIES = ("full", "linformer", "kernelized")  # these also take query lengths


def options_of(name, lengths):
    options = {"key_value_seq_lengths": lengths}
    return options | ({"query_seq_lengths": lengths} if name in OF_QUERIES else {})


@pytest.mark.parametrize("name", CALLS)
def test_lengths_beyond_the_tokens_mean_all_of_them(name):
    query, key, value = random_qkv(10)[:3]
    run = jax.jit(lambda n: CALLS[name](query, key, value, key_value_seq_lengths=n))
    found = run(jnp.asarray([14, 7]))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, run(jnp.asarray([10, 7])))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("length", [0, 3])
def test_padding_may_hold_anything(name, length):
    """NaN there reaches neither outputs nor gradients, which are 0 there; a row gives the same as alone."""
    *arrays, d_out = random_qkv(10)
    inside = jnp.arange(10)[None, :, None, None] < jnp.asarray([10, length])[:, None, None, None]

    call = functools.partial(CALLS[name], **options_of(name, jnp.asarray([10, length])))
    found = pulled(call, jnp.where(inside, d_out, 0), *(jnp.where(inside, x, jnp.nan) for x in arrays))
    for number, x in enumerate(found):
        assert np.isfinite(x).all()
        if number or name != "flowformer":  # its outputs in padding are arbitrary
            assert not np.asarray(jnp.where(inside, 0, x)).any()
    if length and name != "sinkhorn":  # its logits are for ten tokens
        alone = jax.jit(CALLS[name])(*(x[1:, :length] for x in arrays))
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
