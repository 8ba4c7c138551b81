"""What a decay empties, and what the kernels refuse."""

import jax
import jax.numpy as jnp
import pytest

import brl_jax
from tests.support.attention import close, random_qkv


def test_rwkv7_reads_before_the_state_decays():
    """A token that empties the state still removes what was stored before it."""
    key = jnp.eye(4)[None, :2, None]
    value, last = jnp.asarray([1.0, 2.0, 3.0])[None, None, None], jnp.arange(2) == 1
    log_decay = jnp.where(last[None, :, None, None], -jnp.inf, jnp.zeros_like(key))
    first = jnp.broadcast_to(key[:, :1], key.shape)
    out = jax.jit(brl_jax.rwkv7_attention)(
        first, key, jnp.broadcast_to(value, (1, 2, 1, 3)), removal_key=first, log_decay=log_decay,
        learning_rate=jnp.where(last[None, :, None, None], 0.25 * jnp.ones_like(key), jnp.zeros_like(key)),
    )  # fmt: skip
    close(out[0, :, 0], jnp.asarray([[1.0, 2.0, 3.0], [-0.25, -0.5, -0.75]]))


@pytest.mark.parametrize("implementation", ["pallas_interpret", "triton_interpret"])
def test_kernels_refuse_gates_by_feature_and_a_second_key(implementation):
    query, key, value, _ = random_qkv(67)
    options = {"log_decay": -jnp.abs(key), "implementation": implementation}
    with pytest.raises(
        NotImplementedError, match="erase and write must be one number for each token and head"
    ):
        brl_jax.gated_delta_rule_2(query, key, value, erase=key, write=value, **options)
    with pytest.raises(
        NotImplementedError, match="removal_key must be the key under which the value is written"
    ):
        brl_jax.rwkv7_attention(query, key, value, removal_key=key, learning_rate=key, **options)
