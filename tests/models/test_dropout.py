"""Dropout acts on the embedding and on each sublayer, each by itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import FullConfig
from brl_jax.models import DecoderConfig, DecoderLM, make_stack

TOKENS = np.arange(6, dtype=np.int32).reshape(2, 3)


@pytest.fixture(scope="module")
def decoder():
    """A decoder with a rate of a half, and parameters for it."""
    config = DecoderConfig(
        num_layers=1, d_model=16, num_heads=2, d_ff=16, vocab_size=7, mechanism=FullConfig(), dropout=0.5
    )
    model = DecoderLM(config)
    return model, nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS))


def silenced(variables, *names):
    """Parameters in which the arrays under any of these names are 0."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            jnp.zeros_like(leaf) if any(n in jax.tree_util.keystr(path) for n in names) else leaf
        ),
        variables,
    )


def test_the_embedding_is_dropped(decoder):
    """With sublayers that add nothing, outputs change with the random key by the dropped embedding alone."""
    model, variables = decoder
    variables = silenced(variables, "['out']", "['down']")

    @jax.jit
    def run(key):
        return model.apply(variables, TOKENS, deterministic=False, rngs={"dropout": key})[0]

    first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("silent", ["['down']", "['out']"], ids=["mixer", "feed-forward network"])
def test_each_sublayer_is_dropped(decoder, silent):
    """Without the embedding, outputs change with the random key by the one sublayer that adds something."""
    model, variables = decoder
    variables = silenced(variables, silent)
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)
    params = {"params": variables["params"]["stack"]}
    stack = make_stack(model.config.mechanisms, model.config.dimensions)

    @jax.jit
    def run(key):
        return stack.apply(params, x, deterministic=False, rngs={"dropout": key})[0]

    first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
