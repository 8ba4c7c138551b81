"""Checks whose errors name the argument, its value and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the (static) condition holds."""
    if not condition:
        raise ValueError(message)


def check_qkv(query, key, value, names: Sequence[str] = ("query", "key", "value")) -> None:
    """Checks (B, T, N, H), (B, S, K, H), (B, S, K, H) with N a multiple of K and nothing empty."""
    # Not with `require`, which would format its message in every call.
    for array, name in zip((query, key, value), names):
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, head_dim), got {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    q, k, v = names
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{v} must have {k}'s batch, length and heads {key.shape[:3]}, got {value.shape[:3]}"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"{k} must have {q}'s batch size {query.shape[0]}, got {key.shape[0]}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{k} must have {q}'s head_dim {query.shape[3]}, got {key.shape[3]}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the heads of {q} must be a multiple of the heads of {k}, got {query.shape[2]} and {key.shape[2]}"
        )


def check_bias_shape(bias: Any, shape: tuple[int, ...], axes: str) -> None:
    """Raises ValueError unless a bias has 4 axes, each of full size or 1; `axes` names them in the message."""
    require(bias.ndim == 4, f"bias must have 4 axes {axes}, got shape {bias.shape}")
    fits = all(size in (1, full) for size, full in zip(bias.shape, shape))
    require(fits, f"bias must broadcast to {axes} = {shape}, got shape {bias.shape}")


def check_floating(**arrays) -> None:
    """Raises ValueError unless all arrays are floating point and have the first one's dtype."""
    first, dtype = next((name, array.dtype) for name, array in arrays.items())
    for name, array in arrays.items():
        require(array.dtype == dtype, f"{name} must have {first}'s dtype {dtype}, got {array.dtype}")
        require(
            jnp.issubdtype(array.dtype, jnp.floating), f"{name} must be floating point, got {array.dtype}"
        )


def check_within(name: str, values: Any, most: int, least: int = 0) -> None:
    """Raises ValueError unless integers whose values are known lie between `least` and `most`."""
    known = concrete_values(values)
    if known is not None and not ((known >= least) & (known <= most)).all():
        raise ValueError(f"{name} must be from {least} to {most}, got {known}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError, suggesting the nearest choice, unless value is one of them."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")


def concrete_values(array: Any) -> np.ndarray | None:
    """The values of an array; None if it is traced, or partly on devices of another process."""
    if array is None or isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return np.asarray(array)
