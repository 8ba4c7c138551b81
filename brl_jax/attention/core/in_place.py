"""Writing new tokens into an array of all tokens, such as a decoding cache, without a copy of the array."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.by_platform import branches


def write_places(
    array: Float[Array, "*S"], new: Float[Array, "*T"], places: Int[Array, "*#B T"], *, axis: int = 1
) -> Float[Array, "*S"]:
    """`array` with `new` at `places` along `axis`; places at or beyond the array's end are written nowhere.

    XLA turns a write to one place into an update slice, which its CPU compiler then computes twice: once for the new
    array and once more inside the product that reads it. Neither can happen in place, so that both copy the array. A
    write to two places, of which the second does not exist, stays what it is and happens in place.

    Args:
      array: any floats or integers, of which `axis` counts tokens.
      new: an array like it with T tokens along `axis`.
      places: (T,) ints for all rows, or (B, T) for each row of the first axis, with axis=1.
    """
    room = array.shape[axis]

    def write(array: Array, new: Array, places: Array) -> Array:
        if places.ndim == 1:
            return array.at[(slice(None),) * axis + (places,)].set(new, mode="drop")
        rows = jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
        return array.at[rows, places].set(new, mode="drop")

    def write_with_another(array: Array, new: Array, places: Array) -> Array:
        places = jnp.concatenate([places, jnp.full_like(places, room)], axis=-1)
        return write(array, jnp.concatenate([new, new], axis=axis), places)

    new = new.astype(array.dtype)
    if places.shape[-1] > 1:
        return write(array, new, places)
    return branches(array, new, places, cpu=write_with_another, default=write)
