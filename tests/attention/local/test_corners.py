"""Corner cases of local attention: patterns without visible keys, and replicated arrays under shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import ALiBi, BlockMask, T5Bias, alibi_slopes
from tests.attention.local.cases import BOTH, run, xla_attention
from tests.support.attention import random_qkv


@BOTH
def test_a_mask_without_visible_blocks_gives_zeros(schedule):
    arrays = random_qkv(32)
    for result in run(*arrays, pattern=BlockMask.of(8, np.zeros((4, 4), bool))):
        assert not np.asarray(result).any()


@pytest.mark.parametrize(
    "bias",
    [
        ALiBi(alibi_slopes(4)),
        T5Bias(jnp.asarray(np.random.default_rng(0).standard_normal((32, 4)), jnp.float32)),
        jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 20, 20)), jnp.float32),
    ],
    ids=["alibi", "t5", "array"],
)
def test_gradients_of_a_replicated_bias_under_shard_map(bias):
    """Queries, keys and values are sharded over the batch; the bias is the same on all devices."""
    query, key, value, d_out = random_qkv(20)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def attend(query, key, value, bias):
        return xla_attention(query, key, value, local_window_size=5, bias=bias)

    rows = jax.P("data")
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(rows, rows, rows, jax.P()), out_specs=rows)

    def gradient(function):
        loss = lambda *x: jnp.sum(function(*x) * d_out)  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, bias)

    for got, expected in zip(*(jax.tree.leaves(gradient(f)) for f in (sharded, attend)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
