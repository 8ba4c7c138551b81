"""Functions that rank tokens against their plain form in `reference.py`."""

import functools

import jax
import numpy as np
import pytest

from brl_jax import prob_sparse_attention, slice_sort
from brl_jax.attention.sorting import reference
from tests.attention.local.test_local import random_qkv
from tests.attention.oracles import relative_error


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [67, pytest.param(1, marks=pytest.mark.slow)])
def test_equals_its_plain_form(is_causal, length):
    arrays, key = random_qkv(length, heads=4)[:3], jax.random.key(0)
    options = {"factor": 2, "is_causal": is_causal, "scale": 0.3}
    call = jax.jit(functools.partial(prob_sparse_attention, **options))
    expected = reference.prob_sparse_attention(*arrays, rng=key, **options)
    assert relative_error(call(*arrays, rng=key), expected) < 1e-5


@pytest.mark.parametrize("order", ["ascending", "descending", "interleaved", "max_exchange"])
def test_sorting_equals_its_plain_form(order):
    value = random_qkv(13)[2]
    np.testing.assert_array_equal(slice_sort(value, order=order), reference.slice_sort(value, order=order))
