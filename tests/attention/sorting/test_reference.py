"""Functions that rank tokens, against their plain forms in `reference.py`."""

import functools

import jax
import numpy as np
import pytest

from brl_jax import (
    informer_attention,
    reformer_attention,
    reformer_rotations,
    sinkhorn_attention,
    sliceformer_attention,
)
from brl_jax.attention.sorting import reference
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [67, pytest.param(1, marks=pytest.mark.slow)])
def test_equals_its_plain_form(is_causal, length):
    arrays, key = random_qkv(length, heads=4)[:3], jax.random.key(0)
    options = {"factor": 2, "is_causal": is_causal, "scale": 0.3}
    call = jax.jit(functools.partial(informer_attention, **options))
    expected = reference.informer_attention(*arrays, rng=key, **options)
    assert relative_error(call(*arrays, rng=key), expected) < 1e-5


@pytest.mark.parametrize("order", ["ascending", "descending", "interleaved", "max_exchange"])
def test_sorting_equals_its_plain_form(order):
    value = random_qkv(13)[2]
    np.testing.assert_array_equal(
        sliceformer_attention(value, order=order), reference.sliceformer_attention(value, order=order)
    )


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [10, pytest.param(3, marks=pytest.mark.slow)])
def test_sinkhorn_equals_its_plain_form(is_causal, length):
    arrays, count = random_qkv(length, heads=4)[:3], -(-length // 4)
    logits = jax.random.normal(jax.random.key(0), (arrays[0].shape[0], count, arrays[1].shape[2], count))
    options = {"block_size": 4, "iterations": 3, "temperature": 0.6, "is_causal": is_causal, "scale": 0.3}
    call = jax.jit(functools.partial(sinkhorn_attention, **options))
    assert (
        relative_error(call(*arrays, logits), reference.sinkhorn_attention(*arrays, logits, **options)) < 1e-5
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_hashed_attention_equals_its_plain_form(is_causal, length):
    query, _, value, _ = random_qkv(length, heads=4)
    rotations = reformer_rotations(jax.random.key(0), query.shape[3], num_rounds=3, num_buckets=4)
    options = {"chunk_size": 5, "is_causal": is_causal, "scale": 1.5}
    call = jax.jit(functools.partial(reformer_attention, **options))
    expected = reference.reformer_attention(query, value, rotations, **options)
    assert relative_error(call(query, value, rotations), expected) < 1e-5
