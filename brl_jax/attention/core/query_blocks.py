"""Attention on one block of queries after the other, so that not all scores exist at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# The number of queries at a time: their scores for all keys are the largest array in memory.
QUERY_BLOCK = 256


def by_query_blocks(
    function: Callable[[Array, Any, Any], Any],
    block: int,
    query: Float[Array, "B T N H"],
    segments: Int[Array, "B T"] | None = None,
    offset: Any = 0,
) -> Any:
    """function(query, segments, offset), computed on `block` queries at a time.

    The backward pass computes the scores of each block anew.

    Args:
      function: maps queries (B, t, N, H), their segments (B, t) or None, and the offset of the first of them to
        outputs, a pytree of (B, t, ...) arrays; the output of a query must not depend on the other queries.
      block: queries in a block.
      query, segments, offset: those of all queries.

    Returns:
      The outputs of all queries.
    """
    batch, length = query.shape[:2]
    if length <= block:
        return function(query, segments, offset)
    blocks = -(-length // block)

    def cut(x: Array) -> Array:
        room = [(0, 0), (0, blocks * block - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, room).reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    offsets = offset + jnp.arange(blocks, dtype=jnp.int32) * block
    # In a scan over layers, JAX computes before the loop whatever no layer changes, masks of all blocks too, which are
    # as large as all scores. The barrier ties what masks are made from to the query, which every layer changes.
    offsets, segments, _ = lax.optimization_barrier((offsets, segments, query[:1, :1]))
    pieces = (cut(query), None if segments is None else cut(segments), offsets)
    out = lax.map(lambda piece: jax.checkpoint(function)(*piece), pieces)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :length], out)
