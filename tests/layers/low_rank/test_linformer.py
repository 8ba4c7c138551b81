"""The parameters of a Linformer layer, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import LinformerConfig
from brl_jax.models import DecoderConfig
from tests.laws.cases import dimensions
from tests.support.parameters import drawn

CONFIG = LinformerConfig(num_projected=3, max_length=9)


def _init(config, length=7):
    layer = config.layer(dimensions(False))
    x = jax.random.normal(jax.random.key(0), (1, length, 16))
    return layer, drawn(layer.init, x), x


def test_columns_beyond_the_sequence_have_no_influence():
    layer, variables, x = _init(CONFIG)
    moved = variables["params"]["key_projection"].at[:, 7:].set(np.nan)
    changed = layer.apply({"params": variables["params"] | {"key_projection": moved}}, x)[0]
    np.testing.assert_array_equal(changed, layer.apply(variables, x)[0])


def test_what_it_refuses():
    layer, variables, _ = _init(CONFIG)
    with pytest.raises(ValueError, match="max_length must be at least the sequence's length 10, got 9"):
        layer.apply(variables, jnp.zeros((1, 10, 16)))
    with pytest.raises(ValueError, match="linformer has no causal form"):
        DecoderConfig(mechanism=CONFIG)
