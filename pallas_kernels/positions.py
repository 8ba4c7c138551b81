"""Arithmetic on positions that lowers everywhere, even in kernels compiled on another host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def floor_divide(positions: Any, size: int) -> Any:
    """Returns positions // size for ints, NumPy and JAX arrays, and size > 0.

    In a TPU kernel, `//` and `%` ask JAX which chip they run on, and a host that only compiles has none.
    """
    if not isinstance(positions, jax.Array):
        return positions // size
    whole = lax.div(positions, jnp.full(positions.shape, size, positions.dtype))
    return whole - (positions < whole * size).astype(positions.dtype)


def remainder(positions: Any, size: int) -> Any:
    """Returns positions % size, from 0 to size - 1; see `floor_divide`."""
    return positions - floor_divide(positions, size) * size
