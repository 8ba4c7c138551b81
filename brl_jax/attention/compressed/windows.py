"""The history of each of a sequence's blocks."""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float


def block_windows(
    x: Float[Array, "B S N H"], *, blocks: int, block_size: int, history_size: int
) -> Float[Array, "BC history N H"]:
    """The tokens [c * block_size, c * block_size + history_size) of each block c, as a separate row of the batch."""
    if blocks == 1:
        return x[:, :history_size]
    needed = history_size + (blocks - 1) * block_size
    # Concatenate shifted whole blocks: the windows overlap, and the gradient of a strided gather would be a scatter.
    shifts = -(-history_size // block_size)
    lead = shifts * block_size - history_size
    x = jnp.pad(x[:, :needed], ((0, 0), (lead, 0), (0, 0), (0, 0)))
    x = rearrange(x, "b (c t) n h -> b c t n h", t=block_size)
    x = jnp.concatenate([x[:, s : s + blocks] for s in range(shifts)], axis=2)
    return rearrange(x[:, :, lead:], "b c s n h -> (b c) s n h")
