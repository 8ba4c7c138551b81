"""The stack of blocks: where its parameters come from."""

import jax
import jax.numpy as jnp
import pytest

from brl_jax.layers import BRLConfig
from brl_jax.models import Stack
from tests.laws.cases import dimensions


@pytest.mark.parametrize("length", [16, 20])
def test_initialising_with_segments_makes_the_parameters_of_a_token(length):
    """Networks with a queue of outputs go segment by segment, and make their parameters inside."""
    stack = Stack((BRLConfig(window=5, num_compressed=3, block_size=8),) * 2, dimensions(True))

    def shapes(length):
        made = jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((1, length, 16)))
        return [(path, leaf.shape) for path, leaf in jax.tree.leaves_with_path(made["params"])]

    assert shapes(1)
    assert shapes(length) == shapes(1)
