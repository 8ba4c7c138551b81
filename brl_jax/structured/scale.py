"""The size at which the entries of structured weights start, and to which they are limited (appendix E.1)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def rms_limit(fan_in: int, fan_out: int) -> float:
    """Returns RMS_0 = sqrt(min(in, out) / in^2) for weights with `fan_in` inputs and `fan_out` outputs.

    Weights start with this root mean square and are limited to it (appendix E.1).
    """
    return math.sqrt(min(fan_in, fan_out)) / fan_in


def limit_rms(weight: Array, fan_in: int, fan_out: int) -> Array:
    """Returns the weight divided by max(1, RMS / RMS_0), with the RMS over all entries in float32 or wider (E.1)."""
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    # The offset keeps the square root's derivative finite when all weights are zero.
    rms = jnp.sqrt(jnp.mean(jnp.square(wide)) + 1e-30)
    return (wide / jnp.maximum(rms / rms_limit(fan_in, fan_out), 1.0)).astype(weight.dtype)


def draw(key: Array, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Draws normally distributed entries with standard deviation RMS_0."""
    return rms_limit(fan_in, fan_out) * jax.random.normal(key, shape, jnp.float32)
