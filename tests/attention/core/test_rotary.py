"""Rotary positions against their float64 formula, near and far."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.rotary import RopeScaling, rotate


@pytest.mark.parametrize("first", [0, 1000, 5000, 200_000])
def test_equals_its_formula(first):
    """Pair (2 i, 2 i + 1) turns by position * theta^(-2 i / H)."""
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 6)).astype(np.float32)
    positions = first + np.arange(40)
    turned = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions[None], jnp.int32), 10000.0))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]).astype(np.complex128)
    angle = positions[:, None].astype(np.float64) * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    expected = pairs * np.exp(1j * angle)[None, :, None]
    np.testing.assert_allclose(turned[..., 0::2], expected.real, atol=1e-3)
    np.testing.assert_allclose(turned[..., 1::2], expected.imag, atol=1e-3)


def test_scaled_frequencies():
    """Depends on each pair's turns over the original length: few turns are slowed down, many are not."""
    plain = 100.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 32 * plain / (2 * np.pi)
    scaling = RopeScaling("llama3", 8.0, original_length=32, slow_turns=1.0, fast_turns=4.0)
    slowed = scaling.frequencies(100.0, 16) / plain
    np.testing.assert_allclose(slowed[turns < 1], 1 / 8)
    np.testing.assert_allclose(slowed[turns > 4], 1.0)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    np.testing.assert_allclose(slowed[between], share + (1 - share) / 8)
    assert between.any()
    np.testing.assert_allclose(RopeScaling("linear", 2.0).frequencies(100.0, 16), plain / 2)
    x = jnp.ones((1, 3, 1, 16))
    longer = rotate(x, jnp.arange(3)[None], 100.0, RopeScaling("yarn", 8.0, 32, query_key_factor=1.5))
    np.testing.assert_allclose(jnp.linalg.norm(longer, axis=-1), 6.0, rtol=1e-6)
    for wrong in ({"kind": "dynamic"}, {"factor": 0.0}, {"slow_turns": 4.0}):
        with pytest.raises(ValueError, match="must be"):
            RopeScaling(**wrong)
