"""Writes new tokens into a decoding cache without copying it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.by_platform import branches


def write_places(
    array: Float[Array, "*S"], new: Float[Array, "*T"], places: Int[Array, "*#B T"], *, axis: int = 1
) -> Float[Array, "*S"]:
    """`array` with `new` written at `places` along `axis`. Places at or beyond the end are ignored.

    XLA turns a write to one place into an update slice. Its CPU compiler computes that twice, for the new array and
    inside the product that reads it, so neither can happen in place and both copy the array. A write to two places
    stays a scatter, which happens in place; so on a CPU a single write gets a second place, beyond the end.

    Args:
      array: floats or integers, with tokens along `axis`.
      new: an array like it, with T tokens along `axis`.
      places: (T,) ints for all rows; or (B, T), one list for each row, with axis=1.
    """
    size = array.shape[axis]

    def write(array: Array, new: Array, places: Array) -> Array:
        if places.ndim == 1:
            return array.at[(slice(None),) * axis + (places,)].set(new, mode="drop")
        rows = jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
        return array.at[rows, places].set(new, mode="drop")

    def write_with_another(array: Array, new: Array, places: Array) -> Array:
        places = jnp.concatenate([places, jnp.full_like(places, size)], axis=-1)
        return write(array, jnp.concatenate([new, new], axis=axis), places)

    new = new.astype(array.dtype)
    if places.shape[-1] > 1:
        return write(array, new, places)
    return branches(array, new, places, cpu=write_with_another, default=write)
