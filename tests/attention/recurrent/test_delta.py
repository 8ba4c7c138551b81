"""The delta rules are special cases of each other."""

import jax
import jax.numpy as jnp
import pytest

import brl_jax
from tests.attention.test_plain_forms import normal, qkv
from tests.support.attention import close

LENGTH, OPTIONS = 67, {"chunk_size": 16}


def _gates(key):
    beta, log_decay = jax.nn.sigmoid(normal(*key.shape[:3])), -jnp.exp(4 * normal(*key.shape))
    return beta, jnp.broadcast_to(beta[..., None], key.shape), log_decay


def run(name, *arrays, **options):
    return jax.jit(getattr(brl_jax, name), static_argnames="chunk_size")(*arrays, **options)


def test_equal_gates_of_gated_delta_rule_2_are_a_strength():
    query, key, value = qkv(LENGTH)
    beta, gates, log_decay = _gates(key)
    decay = {"log_decay": log_decay}
    got = run("gated_delta_rule_2", query, key, value, erase=gates, write=gates, **decay, **OPTIONS)
    close(got, run("kimi_delta_rule", query, key, value, beta=beta, **decay, **OPTIONS))
    decay = {"log_decay": jnp.broadcast_to(log_decay[..., :1], key.shape)}
    got = run("gated_delta_rule_2", query, key, value, erase=gates, write=gates, **decay, **OPTIONS)
    close(got, run("gated_delta_rule", query, key, value, beta=beta, log_decay=log_decay[..., 0], **OPTIONS))


def test_rwkv7_with_one_key_is_the_delta_rule():
    """Its strength is the learning rate, which multiplies the written key too; nothing decays."""
    query, key, value = qkv(LENGTH)
    beta, rate, _ = _gates(key)
    unit = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    got = run(
        "rwkv7_attention",
        query,
        rate * unit,
        value,
        removal_key=key,
        learning_rate=rate,
        log_decay=jnp.zeros_like(key),
        **OPTIONS,
    )
    close(got, run("delta_rule", query, key, value, beta=beta, **OPTIONS))


def test_rwkv7_reads_before_the_state_decays():
    """A token that empties the state still removes what was stored before it."""
    key = jnp.eye(4)[None, :2, None]
    value, last = jnp.asarray([1.0, 2.0, 3.0])[None, None, None], jnp.arange(2) == 1
    log_decay = jnp.where(last[None, :, None, None], -jnp.inf, jnp.zeros_like(key))
    first = jnp.broadcast_to(key[:, :1], key.shape)
    out = run("rwkv7_attention",
        first, key, jnp.broadcast_to(value, (1, 2, 1, 3)), removal_key=first, log_decay=log_decay,
        learning_rate=jnp.where(last[None, :, None, None], 0.25 * jnp.ones_like(key), jnp.zeros_like(key)),
    )  # fmt: skip
    close(out[0, :, 0], jnp.asarray([[1.0, 2.0, 3.0], [-0.25, -0.5, -0.75]]))


@pytest.mark.parametrize("implementation", ["pallas_interpret", "triton_interpret"])
def test_kernels_refuse_gates_by_feature_and_a_second_key(implementation):
    query, key, value = qkv(LENGTH)
    options = {"log_decay": -jnp.abs(key), "implementation": implementation}
    with pytest.raises(
        NotImplementedError, match="erase and write must be one number for each token and head"
    ):
        brl_jax.gated_delta_rule_2(query, key, value, erase=key, write=value, **options)
    with pytest.raises(
        NotImplementedError, match="removal_key must be the key under which the value is written"
    ):
        brl_jax.rwkv7_attention(query, key, value, removal_key=key, learning_rate=key, **options)
