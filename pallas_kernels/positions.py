"""Arithmetic on positions that lowers everywhere, kernels compiled on another host included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def floor_divide(positions: Any, size: int) -> Any:
    """positions // size for ints, NumPy and JAX arrays, and size > 0.

    Inside a TPU kernel `//` and `%` ask JAX for the chip that it runs on, which a host that only compiles lacks.
    """
    if not isinstance(positions, jax.Array):
        return positions // size
    whole = lax.div(positions, jnp.full(positions.shape, size, positions.dtype))
    return whole - (positions < whole * size).astype(positions.dtype)


def remainder(positions: Any, size: int) -> Any:
    """positions % size, from 0 to size - 1, as `floor_divide`."""
    return positions - floor_divide(positions, size) * size
