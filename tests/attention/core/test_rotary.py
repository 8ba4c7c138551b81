"""Rotary positions against their formula in float64, near and far."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.rotary import rotate


@pytest.mark.parametrize("first", [0, 1000, 5000, 200_000])
def test_equals_its_formula(first):
    """Pair (2 i, 2 i + 1) is turned by position * theta^(-2 i / H)."""
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 6)).astype(np.float32)
    positions = first + np.arange(40)
    turned = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions[None], jnp.int32), 10000.0))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]).astype(np.complex128)
    angle = positions[:, None].astype(np.float64) * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    expected = pairs * np.exp(1j * angle)[None, :, None]
    np.testing.assert_allclose(turned[..., 0::2], expected.real, atol=1e-3)
    np.testing.assert_allclose(turned[..., 1::2], expected.imag, atol=1e-3)
