"""Skyformer with all tokens as samples, how it draws samples, and what the function refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import kernelized_attention, skyformer_attention, skyformer_samples
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv


@pytest.mark.slow
def test_all_tokens_as_samples_are_kernelized_attention():
    query, key, value, _ = random_qkv(6, heads=2)
    places = (jnp.arange(6.0) + 0.5) / 6
    call = jax.jit(functools.partial(skyformer_attention, ridge=1e-3, iterations=20))
    expected = kernelized_attention(query, key, value)
    every = call(query, key, value, samples=jnp.concatenate([places, places]))
    assert relative_error(every, expected) < 1e-2
    assert relative_error(call(query, key, value, samples=places[:2]), expected) > 1e-1


def test_places_are_uniform():
    places = np.asarray(skyformer_samples(jax.random.key(0), 2000))
    assert places.min() >= 0
    assert places.max() < 1
    assert abs(places.mean() - 0.5) < 0.03
