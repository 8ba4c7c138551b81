"""How heads lie in the 128 lanes of a TPU register.

Arrays arrive as (batch, length, heads, head_dim). A kernel sees them as (batch, length, tiles * width). One tile holds
one head of 128 or 256 lanes, or several narrower heads that fill 128 lanes, so that no lane is wasted and the reshape
moves no data.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core.arithmetic import EMPTY, NN, TN, dot

LANES = 128
MAX_HEAD_DIM = 256


class HeadLayout(NamedTuple):
    """One tile holds `packed` heads of `head_dim` lanes; `group` query tiles read the same key tile."""

    head_dim: int
    packed: int
    group: int

    @property
    def width(self) -> int:
        """Lanes in a tile."""
        return self.head_dim * self.packed


def layout_of(heads: int, key_heads: int, head_dim: int) -> HeadLayout:
    """Returns the layout of `heads` query heads and `key_heads` key heads; see `pack`."""
    head_dim = next(size for size in (32, 64, 128, 256) if size >= head_dim)
    packed, groups = max(1, LANES // head_dim), heads // key_heads
    if packed > 1:
        groups = groups // packed if groups % packed == 0 else 1
    return HeadLayout(head_dim, packed, groups)


def pack(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K H"]
) -> tuple[Float[Array, "B T L"], Float[Array, "B S M"], Float[Array, "B S M"], HeadLayout]:
    """Packs heads into lanes.

    A head dimension that is not a power of two is padded with zeros, and an odd number of heads with empty heads.

    For narrow grouped heads: if the group is a multiple of the heads in a tile, each key head is repeated across its
    tile (the keys grow by at most 128 / head_dim, and remain smaller than the queries); otherwise keys are repeated to
    the number of query heads. JAX differentiates this function.
    """
    heads, head_dim = query.shape[2:]
    layout = layout_of(heads, key.shape[2], head_dim)
    repeats = heads // key.shape[2] // layout.group
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    extra = -heads % layout.packed
    return _flat(query, extra, layout), _flat(key, extra, layout), _flat(value, extra, layout), layout


def pack_queries(x: Float[Array, "B T N H"], layout: HeadLayout) -> Float[Array, "B T L"]:
    """Packs an array that is laid out like the queries; see `pack`."""
    return _flat(x, -x.shape[2] % layout.packed, layout)


def _flat(x: Array, extra: int, layout: HeadLayout) -> Array:
    pad_lanes = layout.head_dim - x.shape[3]
    if extra or pad_lanes:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, pad_lanes)))
    return x.reshape(*x.shape[:2], -1)


def unpack(
    x: Float[Array, "B T L"], layout: HeadLayout, heads: int, head_dim: int
) -> Float[Array, "B T N H"]:
    """Inverts `pack` for an array that is laid out like the queries."""
    x = x.reshape(*x.shape[:2], -1, layout.head_dim)
    return x[:, :, :heads, :head_dim]


def unpack_rows(rows: Float[Array, "B tiles packed T"], heads: int) -> Float[Array, "B T N"]:
    """Returns one number for each head and query as (batch, length, heads)."""
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :heads].swapaxes(1, 2)


def pack_log_sums(
    log_sums: Float[Array, "B T N"], scale: float, layout: HeadLayout
) -> Float[Array, "B tiles statistics T"]:
    """Returns the kernels' statistics of rows whose log-sum-exp is known; see `arithmetic.log_sum_exp`."""
    seen = log_sums > -jnp.inf
    top = jnp.where(seen, log_sums / scale, 0.0)
    log_total = jnp.where(seen, 0.0, EMPTY)

    def pack(x: Float[Array, "B T N"]) -> Float[Array, "B tiles packed T"]:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % layout.packed)))
        return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], -1, layout.packed, x.shape[1])

    return jnp.concatenate([pack(top), pack(log_total)], axis=2)


def pack_rows(x: Int[Array, "B T K M"], heads: int, layout: HeadLayout) -> Int[Array, "B tiles rows T"]:
    """Returns M numbers for each query and key head as M rows for each of the query heads packed in a tile."""
    extra = -heads % layout.packed
    rows = jnp.repeat(jnp.moveaxis(x, 1, 3), heads // x.shape[2], axis=1)
    rows = jnp.pad(rows, ((0, 0), (0, extra), (0, 0), (0, 0)), mode="edge")
    return rows.reshape(x.shape[0], -1, layout.packed * x.shape[3], x.shape[1])


def lanes_of_head(x: Float[Array, "rows width"], head: int, layout: HeadLayout) -> Float[Array, "rows width"]:
    """Returns x with zeros in the lanes of all packed heads except one."""
    if layout.packed == 1:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = head * layout.head_dim
    return jnp.where((lane >= first) & (lane < first + layout.head_dim), x, jnp.zeros_like(x))


def transposed_product(
    x: Float[Array, "rows width"], weights: Float[Array, "rows columns"], head: int, layout: HeadLayout
) -> Float[Array, "head_dim columns"]:
    """Returns x^T weights for the lanes of one packed head.

    If heads share lanes, x is transposed first, so that the product covers one head's rows instead of all heads'.
    """
    if layout.packed == 1:
        return dot(x, weights, TN)
    return dot(x.T[head * layout.head_dim : (head + 1) * layout.head_dim], weights, NN)
