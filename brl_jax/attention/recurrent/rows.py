"""Layouts of a chunk's arrays, and masks on them.

Heads come before tokens. Query heads that share a key head are stacked: the G queries of each of C tokens become R = G
* C rows, so that their product with the chunk's keys is one matrix product per key head.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def heads_first(x: Float[Array, "B C K H"]) -> Float[Array, "B K C H"]:
    """Puts heads before tokens, in float32."""
    return jnp.swapaxes(x, 1, 2).astype(jnp.float32)


def group_rows(x: Float[Array, "B C N H"], kv_heads: int) -> Float[Array, "B K R H"]:
    """The queries of each key head as R = N / K * C rows, in float32."""
    batch, length, heads, size = x.shape
    return heads_first(x).reshape(batch, kv_heads, heads // kv_heads * length, size)


def ungroup_rows(x: Float[Array, "B K R H"], length: int) -> Float[Array, "B C N H"]:
    """The inverse of `group_rows` for chunks of `length` tokens."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, length, x.shape[-1]), 1, 2)


def zero_unless(condition: Bool[Array, " *leading"] | None, x: Array) -> Array:
    """x where the condition holds, else 0.

    The condition broadcasts against the leading axes of x; None holds everywhere.
    """
    if condition is None:
        return x
    return jnp.where(
        condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, jnp.zeros((), x.dtype)
    )


def mask_scores(pairs: Bool[Array, "#B C C"], scores: Float[Array, "B K R C"]) -> Float[Array, "B K R C"]:
    """The scores of visible pairs, and 0 elsewhere."""
    batch, heads, rows, length = scores.shape
    grouped = scores.reshape(batch, heads, rows // length, length, length)
    return jnp.where(pairs[:, None, None], grouped, jnp.zeros((), scores.dtype)).reshape(scores.shape)


def mask_rows(queries: Bool[Array, "B C"] | None, x: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
    """The rows of the queries for which the condition holds, and 0 elsewhere; None holds for all."""
    if queries is None:
        return x
    grouped = x.reshape(*x.shape[:2], -1, queries.shape[1], x.shape[-1])
    return zero_unless(queries[:, None, None], grouped).reshape(x.shape)
