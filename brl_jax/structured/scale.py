"""The size of the entries of structured weights at initialisation, which also limits them (appendix E.1)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def rms_limit(fan_in: int, fan_out: int) -> float:
    """RMS_0 = sqrt(min(in, out) / in^2) for the weights of a product of `fan_in` inputs and `fan_out` outputs.

    Weights are initialised with this root mean square and limited to it (appendix E.1).
    """
    return math.sqrt(min(fan_in, fan_out)) / fan_in


def limit_rms(weight: Array, fan_in: int, fan_out: int) -> Array:
    """The weight divided by max(1, RMS / RMS_0), where RMS is over all entries in float32 or wider (appendix E.1)."""
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    # The square root has no finite derivative at 0, which it would reach for weights that are all zero.
    rms = jnp.sqrt(jnp.mean(jnp.square(wide)) + 1e-30)
    return (wide / jnp.maximum(rms / rms_limit(fan_in, fan_out), 1.0)).astype(weight.dtype)


def draw(key: Array, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Array:
    """Normally distributed entries with the standard deviation RMS_0."""
    return rms_limit(fan_in, fan_out) * jax.random.normal(key, shape, jnp.float32)
