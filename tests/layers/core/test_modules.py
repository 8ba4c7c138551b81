"""The feed-forward networks against their formulas."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers.core.modules import FeedForward, GatedNorm
from tests.laws.cases import dimensions
from tests.laws.networks import as_float64, relative_error

FORMULAS = {
    "glu_relu": lambda x, w: (np.maximum(x @ w["gate"], 0) * (x @ w["up"])) @ w["down"],
    "swiglu": lambda x, w: (x @ w["gate"] / (1 + np.exp(-(x @ w["gate"]))) * (x @ w["up"])) @ w["down"],
    "relu": lambda x, w: np.maximum(x @ w["up"], 0) @ w["down"],
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_feed_forward(kind):
    layer = FeedForward(dimensions(True, ffn=kind))
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    variables = nn.unbox(layer.init(jax.random.key(1), x))
    weights = {name: own["kernel"] for name, own in as_float64(variables["params"]).items()}
    assert set(weights) == ({"up", "down"} if kind == "relu" else {"gate", "up", "down"})
    assert relative_error(layer.apply(variables, x), FORMULAS[kind](as_float64(x), weights)) < 1e-6


def test_an_unknown_kind():
    with pytest.raises(ValueError, match=r"ffn must be one of .* got 'glu'"):
        dimensions(True, ffn="glu")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation):
    """Each head by itself; all share one scale."""
    x, gate = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 4))
    scale = jnp.asarray([0.5, 1.0, 2.0, -1.0])
    layer = GatedNorm(dimensions(True, norm_epsilon=0.1), activation)
    got = layer.apply({"params": {"scale": scale}}, x, gate)
    opened = 1 / (1 + np.exp(-as_float64(gate)))
    opened = opened * as_float64(gate) if activation == "silu" else opened
    root = np.sqrt((as_float64(x) ** 2).mean(-1, keepdims=True) + 0.1)
    assert relative_error(got, as_float64(x) / root * as_float64(scale) * opened) < 1e-6
