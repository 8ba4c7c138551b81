"""Linen modules used from Flax NNX, through its bridge."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from brl_jax import DecoderConfig, DecoderLM, Dimensions, LocalConfig, generate
from tests.laws.cases import CASES
from tests.marks import slow_unless

TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10) % 11


@pytest.mark.parametrize("name", slow_unless(("local-sliding", "brl-layer"), ("local-sliding",)))
def test_to_nnx(name):
    """With the same parameters, the bridged model has the Linen model's outputs and gradients."""
    model = DecoderLM(
        DecoderConfig(vocab_size=11, num_layers=2, d_model=16, num_heads=4, mechanism=CASES[name])
    )
    # Without a mesh, parameters cannot be sharded as they are created.
    with nnx.use_eager_sharding(False):
        bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(TOKENS)
    logits, _ = nnx.jit(lambda m: m(TOKENS))(bridged)
    params = pure_parameters(bridged)
    expected, _ = jax.jit(model.apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)

    gradient = nnx.jit(nnx.grad(lambda m: m(TOKENS)[0].sum()))(bridged)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient) if leaf.size > 1000)


def pure_parameters(module):
    """Extracts the Linen parameters of a bridged module."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, nn.meta.AxisMetadata) else leaf,
        nnx.to_pure_dict(nnx.state(module, nnx.Param)),
        is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata),
    )


LAYER = LocalConfig(window=4).layer(
    Dimensions(d_model=16, num_heads=2, num_kv_heads=2, head_dim=8, d_ff=32, is_causal=True)
)


class OwnBlock(nnx.Module):
    """A custom residual block around a single layer."""

    def __init__(self, x, rngs):
        with nnx.use_eager_sharding(False):
            self.mixer = nnx.bridge.ToNNX(LAYER, rngs=rngs).lazy_init(x)
        self.gain = nnx.Param(jnp.ones((1, 1, 16)))

    def __call__(self, x):
        y, _, _ = self.mixer(x)
        return x + y * self.gain[...]


@pytest.mark.slow
def test_a_single_layer_in_ones_own_module():
    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    block = OwnBlock(x, nnx.Rngs(0))
    y = nnx.jit(lambda m, x: m(x))(block, x)
    params = pure_parameters(block.mixer)
    mixed, _, _ = LAYER.apply({"params": params}, x)
    np.testing.assert_allclose(y, x + mixed, rtol=1e-5, atol=1e-6)
    moved = nnx.jit(lambda m, x: m(x))(block, x.at[:, 7].multiply(-1.0))
    np.testing.assert_array_equal(moved[:, :7], y[:, :7])
    gradient = nnx.jit(nnx.grad(lambda m: jnp.square(m(x)).sum()))(block)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_generate_from_nnx_parameters():
    config = DecoderConfig(
        vocab_size=11, num_layers=1, d_model=16, num_heads=2, mechanism=LocalConfig(window=4)
    )
    model = DecoderLM(config)
    with nnx.use_eager_sharding(False):
        bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(TOKENS)
    text = generate(model, {"params": pure_parameters(bridged)}, TOKENS, max_new_tokens=3, temperature=0)
    logits, _ = nnx.jit(lambda m, tokens: m(tokens))(bridged, text)
    np.testing.assert_array_equal(text[:, 10:], jnp.argmax(logits[:, 9:-1], axis=-1))
