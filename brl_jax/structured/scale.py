"""The size of the entries of structured weights: what they are drawn with and limited to (002, E.1)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def rms_limit(fan_in: int, fan_out: int) -> float:
    """RMS_0 = sqrt(min(in, out) / in^2), to which the weights of a product of `fan_in` inputs with `fan_out` outputs
    are drawn and limited (002, E.1)."""
    return math.sqrt(min(fan_in, fan_out)) / fan_in


def limit_rms(weight: Array, fan_in: int, fan_out: int) -> Array:
    """The weight divided by max(1, RMS(weight) / RMS_0), RMS over all its entries, in float32 or wider (002, E.1)."""
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    # Of weights that are all zero the root has no slope.
    rms = jnp.sqrt(jnp.mean(jnp.square(wide)) + 1e-30)
    return (wide / jnp.maximum(rms / rms_limit(fan_in, fan_out), 1.0)).astype(weight.dtype)


def draw(key: Array, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Normal numbers of standard deviation RMS_0."""
    return rms_limit(fan_in, fan_out) * jax.random.normal(key, shape, jnp.float32)
