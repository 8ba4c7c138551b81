"""The parameters of a Linformer layer."""

import jax
import numpy as np

from brl_jax.layers import LinformerConfig
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
