"""Linen modules used from Flax NNX, through its bridge."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from brl_jax import DecoderConfig, DecoderLM
from tests.laws.cases import VARIANTS

TOKENS = jnp.arange(20, dtype=jnp.int32).reshape(2, 10) % 11


@pytest.mark.parametrize(
    "mechanism", [VARIANTS["local"]["sliding"], VARIANTS["brl"]["layer"]], ids=["local", "brl"]
)
def test_to_nnx(mechanism):
    """The bridged model computes what the Linen model computes with the same parameters, and has their gradients."""
    model = DecoderLM(
        DecoderConfig(vocab_size=11, num_layers=2, d_model=16, num_heads=4, mechanism=mechanism)
    )
    # Without a mesh there is nothing to shard parameters over as they are made.
    with nnx.use_eager_sharding(False):
        bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(TOKENS)
    logits, _ = nnx.jit(lambda m: m(TOKENS))(bridged)
    params = jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, nn.meta.AxisMetadata) else leaf,
        nnx.to_pure_dict(nnx.state(bridged, nnx.Param)),
        is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata),
    )
    expected, _ = jax.jit(model.apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)

    gradient = nnx.jit(nnx.grad(lambda m: m(TOKENS)[0].sum()))(bridged)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient) if leaf.size > 1000)
