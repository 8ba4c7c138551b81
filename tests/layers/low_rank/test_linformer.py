"""What a Linformer layer's parameters are, and what it refuses."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import LinformerConfig
from brl_jax.models import DecoderConfig
from tests.laws.cases import dimensions
from tests.laws.networks import relative_error

CONFIG = LinformerConfig(num_projected=3, max_length=9)


def _init(config, length=7):
    layer = config.layer(dimensions(False))
    x = jax.random.normal(jax.random.key(0), (1, length, 16))
    return layer, nn.unbox(layer.init(jax.random.key(1), x)), x


@pytest.mark.parametrize(
    ("sharing", "shapes"),
    [
        ("none", {"key_projection": (2, 3, 9), "value_projection": (2, 3, 9)}),
        ("heads", {"key_projection": (3, 9), "value_projection": (3, 9)}),
        ("key_value", {"key_projection": (3, 9)}),
    ],
)
def test_sharing(sharing, shapes):
    """The same numbers in each head and for keys and values make a shared projection of one that is not."""
    layer, variables, x = _init(dataclasses.replace(CONFIG, sharing=sharing))
    params = variables["params"]
    assert {name: params[name].shape for name in params if name.endswith("projection")} == shapes
    own = CONFIG.layer(dimensions(False)).clone(mechanism=dataclasses.replace(CONFIG, sharing="none"))
    spread = {
        name: jnp.broadcast_to(params.get(name, params["key_projection"]), (2, 3, 9))
        for name in ("key_projection", "value_projection")
    }
    expected = own.apply({"params": params | spread}, x)[0]
    assert relative_error(layer.apply(variables, x)[0], expected) < 1e-6


def test_columns_beyond_the_sequence_have_no_influence():
    layer, variables, x = _init(CONFIG)
    moved = variables["params"]["key_projection"].at[:, 7:].set(np.nan)
    changed = layer.apply({"params": variables["params"] | {"key_projection": moved}}, x)[0]
    np.testing.assert_array_equal(changed, layer.apply(variables, x)[0])


def test_what_it_refuses():
    layer, variables, _ = _init(CONFIG)
    with pytest.raises(ValueError, match="max_length must be at least the sequence's length 10, got 9"):
        layer.apply(variables, jnp.zeros((1, 10, 16)))
    with pytest.raises(ValueError, match="LinformerConfig has no causal form"):
        DecoderConfig(mechanism=CONFIG)
    with pytest.raises(ValueError, match="LinformerConfig has no causal form"):
        CONFIG.layer(dimensions(True)).init(jax.random.key(0), jnp.zeros((1, 4, 16)))
    with pytest.raises(ValueError, match="'head'; did you mean 'heads'"):
        LinformerConfig(sharing="head")
