"""The feed-forward networks against their formulas."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BilinearBTTConfig, BilinearMLRConfig, LongShortConfig, NormConfig
from brl_jax.layers.core.modules import FeedForward, GatedNorm
from tests.laws.cases import dimensions
from tests.support.numbers import as_float64, relative_error
from tests.support.parameters import drawn

FORMULAS = {
    "glu_relu": lambda x, w: (np.maximum(x @ w["gate"], 0) * (x @ w["up"])) @ w["down"],
    "swiglu": lambda x, w: (x @ w["gate"] / (1 + np.exp(-(x @ w["gate"]))) * (x @ w["up"])) @ w["down"],
    "relu": lambda x, w: np.maximum(x @ w["up"], 0) @ w["down"],
    "gelu": lambda x, w: ((x @ w["up"]) * np.vectorize(_normal)(x @ w["up"])) @ w["down"],
}


def _normal(u):
    """The normal distribution function at u."""
    return (1 + math.erf(u / math.sqrt(2))) / 2


@pytest.mark.parametrize("kind", FORMULAS)
def test_feed_forward(kind):
    layer = FeedForward(dimensions(True, ffn=kind))
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    variables = drawn(layer.init, x)
    weights = {name: own["kernel"] for name, own in as_float64(variables["params"]).items()}
    assert set(weights) == ({"up", "down"} if kind in ("relu", "gelu") else {"gate", "up", "down"})
    assert relative_error(layer.apply(variables, x), FORMULAS[kind](as_float64(x), weights)) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation):
    """Normalizes each head separately; all heads share one scale."""
    x, gate = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 4))
    scale = jnp.asarray([0.5, 1.0, 2.0, -1.0])
    layer = GatedNorm(dimensions(True, norm_epsilon=0.1), activation)
    got = layer.apply({"params": {"scale": scale}}, x, gate)
    opened = 1 / (1 + np.exp(-as_float64(gate)))
    opened = opened * as_float64(gate) if activation == "silu" else opened
    root = np.sqrt((as_float64(x) ** 2).mean(-1, keepdims=True) + 0.1)
    assert relative_error(got, as_float64(x) / root * as_float64(scale) * opened) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "normalised"),
    [
        (BilinearMLRConfig(ranks=(3, 1), limit_weights=False), ("query_0", "query_1", "key_0", "key_1")),
        (BilinearBTTConfig(limit_weights=False), ("left",)),
        (LongShortConfig(window=3, chunk_size=2), ("key", "value")),
        (NormConfig(), ("value",)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, tuple) else "",
)
def test_norms_inside_mechanisms_follow_norm_epsilon(mechanism, normalised):
    """Scaling the normalized input by three and epsilon by nine changes nothing, in training and generation; scaling
    the input alone does."""
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def outputs(epsilon, params, cached):
        layer = mechanism.layer(dimensions(True, norm_epsilon=epsilon))
        cache = layer.init_cache(1, 6) if cached else None
        return layer.apply({"params": params}, x, cache=cache)[0]

    init = jax.jit(mechanism.layer(dimensions(True)).init)
    params = nn.unbox(init(jax.random.key(1), x))["params"]
    larger = params | {name: jax.tree.map(lambda leaf: 3 * leaf, params[name]) for name in normalised}
    for cached in (False, True):
        expected = outputs(0.1, params, cached)
        assert relative_error(outputs(0.9, larger, cached), expected) < 1e-5
        assert relative_error(outputs(0.1, larger, cached), expected) > 1e-3
