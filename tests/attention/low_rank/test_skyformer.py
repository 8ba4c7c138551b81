"""Where Skyformer's samples come from, when they are drawn anew, and what the function refuses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import SkyformerConfig, Stack, kernelized_attention, skyformer_attention, skyformer_samples
from tests.laws.cases import dimensions
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


def test_samples_are_of_the_key_or_of_the_seed():
    """A deterministic call takes the seed's samples whatever key it has, and in training each key gives its own."""
    stack = Stack((SkyformerConfig(num_samples=4),) * 2, dimensions(False))
    x = np.random.default_rng(0).standard_normal((1, 20, 16)).astype(np.float32)
    variables = nn.unbox(jax.jit(stack.init)(jax.random.key(1), x))

    @functools.partial(jax.jit, static_argnums=1)
    def run(key, deterministic):
        return stack.apply(variables, x, deterministic=deterministic, rngs={"sample": key})[0]

    one, other = jax.random.key(2), jax.random.key(3)
    fixed, drawn = run(one, True), run(one, False)
    np.testing.assert_array_equal(run(other, True), fixed)
    np.testing.assert_array_equal(run(one, False), drawn)
    assert relative_error(drawn, fixed) > 1e-3
    assert relative_error(run(other, False), drawn) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rng": None}, "rng .* or samples must be given, and not both, got neither"),
        ({"samples": jnp.ones(3) / 2}, "rng .* or samples must be given, and not both, got both"),
        (
            {"rng": None, "samples": jnp.ones((2, 3)) / 2},
            r"samples must have shape \(samples,\), got \(2, 3\)",
        ),
        ({"num_samples": 0}, "num_samples must be an int of at least 1, got 0"),
        ({"ridge": -1.0}, "ridge must be a finite number of at least 0, got -1.0"),
        ({"is_causal": True}, "is_causal must be False with Skyformer"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        skyformer_attention(*random_qkv(6)[:3], **({"rng": jax.random.key(0)} | changes))


def test_places_are_uniform():
    places = np.asarray(skyformer_samples(jax.random.key(0), 2000))
    assert places.min() >= 0
    assert places.max() < 1
    assert abs(places.mean() - 0.5) < 0.03
