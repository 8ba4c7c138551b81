"""Tokens cut into blocks, and attention on one block of queries at a time, so that only their scores exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from brl_jax.attention.core.by_platform import recomputed

# Queries in a block: their scores for all keys are the largest array in memory.
QUERY_BLOCK = 256


def in_blocks(x: Shaped[Array, "*S"], size: int, *, axis: int = 1, fill: Any = 0) -> Shaped[Array, "*T"]:
    """x with `axis` cut into blocks of `size`, two axes for one; `fill` completes the last block."""
    blocks = -(-x.shape[axis] // size)
    room = [(0, 0)] * x.ndim
    room[axis] = (0, blocks * size - x.shape[axis])
    x = jnp.pad(x, room, constant_values=fill)
    return x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])


def by_query_blocks(
    function: Callable[[Array, Any, Any], Any],
    block: int,
    query: Float[Array, "B T N H"],
    segments: Int[Array, "B T *S"] | None = None,
    offset: Any = 0,
) -> Any:
    """function(query, segments, offset), computed on `block` queries at a time, in the backward pass too.

    Args:
      function: maps t queries (B, t, N, H), their segments (B, t) or other ints (B, t, ...) or None, and the offset of
        the first one to outputs, a pytree of (B, t, ...) arrays. Each query's output must not depend on the other
        queries.
    """
    batch, length = query.shape[:2]
    if length <= block:
        return function(query, segments, offset)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(in_blocks(x, block), 1, 0)

    offsets = offset + jnp.arange(-(-length // block), dtype=jnp.int32) * block
    # In a scan over layers, JAX moves what no layer changes out of the loop. That would include the masks of all
    # blocks, which are as large as all scores. The barrier ties their inputs to the query, which each layer changes.
    offsets, segments, _ = lax.optimization_barrier((offsets, segments, query[:1, :1]))
    pieces = (cut(query), None if segments is None else cut(segments), offsets)
    out = lax.map(lambda piece: recomputed(function, *piece), pieces)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :length], out)
