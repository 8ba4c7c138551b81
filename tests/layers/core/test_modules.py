"""The feed-forward networks against their formulas."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from brl_jax.layers.core.modules import FeedForward
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
