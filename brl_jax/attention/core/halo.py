"""Fetches tokens from neighbouring devices, for sequences sharded over a mesh axis inside `jax.shard_map`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def tokens_before(x: Float[Array, "B T ..."], count: int, axis_name: str) -> Float[Array, "B count ..."]:
    """The `count` tokens before this device's, in order; zeros before the start of the sequence."""
    return _neighbours(x, count, axis_name, after=False)


def tokens_after(x: Float[Array, "B T ..."], count: int, axis_name: str) -> Float[Array, "B count ..."]:
    """The `count` tokens after this device's, in order; zeros after the end of the sequence."""
    return _neighbours(x, count, axis_name, after=True)


def with_halo(x: Float[Array, "B T ..."], before: int, after: int, axis_name: str) -> Float[Array, "B S ..."]:
    """This device's tokens, with `before` tokens in front and `after` tokens behind."""
    parts = [tokens_before(x, before, axis_name)] if before else []
    parts += [x, *([tokens_after(x, after, axis_name)] if after else [])]
    return jnp.concatenate(parts, axis=1)


def _neighbours(x: Array, count: int, axis_name: str, after: bool) -> Array:
    size, shards = x.shape[1], lax.axis_size(axis_name)
    pieces = []
    # The neighbour `hop` devices away sends the tokens nearest to this device; all but the farthest send everything.
    for hop in range(1, min(-(-count // size), shards - 1) + 1):
        part = min(size, count - (hop - 1) * size)
        piece = (
            lax.slice_in_dim(x, 0, part, axis=1) if after else lax.slice_in_dim(x, size - part, size, axis=1)
        )
        pairs = [(i, i - hop) if after else (i - hop, i) for i in range(hop, shards)]
        pieces.append(lax.ppermute(piece, axis_name, pairs))
    missing = count - sum(piece.shape[1] for piece in pieces)
    if missing or not pieces:
        pieces.append(jnp.zeros((x.shape[0], missing, *x.shape[2:]), x.dtype))
    return jnp.concatenate(pieces if after else pieces[::-1], axis=1)
