"""Attention some queries at a time, so that scores of all queries on all keys never exist together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def by_query_blocks(
    function: Callable[[Array, Any, Any], Array],
    block: int,
    query: Float[Array, "B T N H"],
    segments: Int[Array, "B T"] | None = None,
    offset: Any = 0,
) -> Float[Array, "B T N V"]:
    """function(query, segments, offset), `block` queries after the other; the backward pass makes scores again.

    Args:
      function: of queries (B, t, N, H), their segments (B, t) or None and the offset of the first of them; it treats
        each query by itself.
      block: queries at a time.
      query, segments, offset: for all of them.
    """
    batch, length = query.shape[:2]
    if length <= block:
        return function(query, segments, offset)
    blocks = -(-length // block)

    def cut(x: Array) -> Array:
        room = [(0, 0), (0, blocks * block - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, room).reshape(batch, blocks, block, *x.shape[2:]), 1, 0)

    offsets = offset + jnp.arange(blocks, dtype=jnp.int32) * block
    pieces = (cut(query), None if segments is None else cut(segments), offsets)
    out = lax.map(lambda piece: jax.checkpoint(function)(*piece), pieces)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, *out.shape[3:])[:, :length]
