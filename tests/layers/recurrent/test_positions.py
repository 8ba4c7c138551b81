"""Rotary positions of layers with a recurrent state."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import FlashConfig, GAUConfig, LinearConfig, NormConfig
from tests.laws.cases import dimensions
from tests.marks import slow_unless


@pytest.mark.parametrize(
    "config", slow_unless([LinearConfig(), LinearConfig(normalize=False), NormConfig()], (LinearConfig(),))
)
def test_scores_depend_on_the_distance_only(config):
    """The attention matrix of two tokens at positions (3, 5), (103, 105) and (1003, 1005); another distance differs."""
    layer = config.layer(dimensions(True))
    x = jax.random.normal(jax.random.key(0), (1, 2, 16))
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))

    @jax.jit
    def weights(positions):
        _, sown = layer.apply({"params": variables["params"]}, x, positions=positions, mutable="maps")
        return sown["maps"]["weights"][0]

    def matrix(*positions):
        return np.asarray(weights(jnp.asarray([positions])))

    near = matrix(3, 5)
    assert np.abs(near[0, :, 1, 0]).min() > 1e-3
    np.testing.assert_allclose(matrix(103, 105), near, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(matrix(1003, 1005), near, rtol=1e-3, atol=1e-4)
    assert np.abs(matrix(3, 6) - near).max() > 1e-2


@pytest.mark.parametrize("config", [GAUConfig(key_dim=8), FlashConfig(key_dim=8)])
@pytest.mark.parametrize("theta", [100.0, None])
def test_the_bias_of_gated_attention_units_turns_by_the_networks_base(config, theta):
    """Without queries and keys only the bias gives weights: the mean of the cosines of the angles, squared. FLASH has
    it within chunks."""
    layer = config.layer(dataclasses.replace(dimensions(True), rope_theta=theta))
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))["params"]
    params = params | {"scale": jnp.zeros_like(params["scale"])}
    _, sown = jax.jit(lambda params: layer.apply({"params": params}, x, mutable="maps"))(params)
    frequency = (theta or 10_000.0) ** (-np.arange(0, 8, 2) / 8)
    distance = np.arange(6)[:, None] - np.arange(6)
    bias = np.cos(distance[..., None] * frequency).sum(-1) * 2 / (2 * 8)
    expected = np.tril(np.maximum(bias, 0) ** 2)
    np.testing.assert_allclose(sown["maps"]["weights"][0][0, 0], expected, atol=1e-5)
