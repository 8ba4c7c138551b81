"""`gau_attention` on a mesh that shards its sequences: keys and values go around the devices.

They go around as in `brl_jax.attention.dense.sharded`, with causal rows balanced in the same way. Nothing needs to be
normalised: partial results add up, and the backward pass needs no result of the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.biases import PositionBias, RotaryBias
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.dense.sharded import Ring, Shard
from brl_jax.attention.recurrent.seen_ranges import score_factors, seen_ranges
from brl_jax.attention.recurrent.squared_relu import attend_pairs
from brl_jax.sharding import sequence_axis, shard_call


def ring_axis(
    query: Array, key: Array, bias: PositionBias | None, is_causal: bool, implementation: Any
) -> str | None:
    """The mesh axis along which the keys of a call can go around, or None."""
    if implementation not in (None, "xla") or not (bias is None or isinstance(bias, RotaryBias)):
        return None
    if bias is not None and key.shape[2] != query.shape[2]:
        return None
    block = 2 if is_causal else 1
    return sequence_axis(query.shape[1], block) and sequence_axis(key.shape[1], block)


def gau_on_mesh(
    axis: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | None,
    query_positions: Int[Array, "B T"],
    query_segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    *,
    is_causal: bool,
    chunk_size: int,
) -> Float[Array, "B T N V"]:
    """`gau_attention` on rows that are sharded over `axis`, from `ring_axis`.

    Queries are divided by the number of keys they see in their whole row, and the bias is part of the factors, so
    the parts need neither.
    """
    assert bias is None or isinstance(bias, RotaryBias)
    ranges = seen_ranges(query_positions, query_segments, key_segments, key.shape[:2], is_causal)
    rows, columns = score_factors(query, key, bias, query_positions, ranges)
    columns = key if bias is None else columns
    if key_segments is not None and query_segments is None:
        query_segments = jnp.zeros(query.shape[:2], jnp.int32)
    shard = functools.partial(
        _shard, Ring(axis, is_causal), functools.partial(_pair, chunk_size=chunk_size), query.dtype
    )
    queries, keys = (("batch", "length", heads, None) for heads in ("heads", "kv_heads"))
    names = [queries, keys, keys, ("batch", "length"), ("batch", "length")]
    return shard_call(shard, (rows, columns, value, query_segments, key_segments), names, queries)


def _shard(
    ring: Ring, pair: Callable[..., Array], dtype: Any, query: Array, key: Array, value: Array, *ids: Any
) -> Float[Array, "B t N V"]:
    """The results of this device's queries."""
    query, shard, query_ids, _ = ring.parts(query, key, value, ids)
    return ring.collect(_add_around(_Static(ring, pair), query, shard, query_ids).astype(dtype))


def _pair(query: Array, key: Array, value: Array, ids: tuple, is_causal: bool, *, chunk_size: int) -> Array:
    """The float32 sums of one part of the queries over one part of the keys."""
    places = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32), query.shape[:2])
    return attend_pairs(
        query, key, value, None, places, *ids,
        is_causal=is_causal, each_row=False, chunk_size=chunk_size, divided=True, dtype=jnp.float32,
    )  # fmt: skip


class _Static(NamedTuple):
    """The static part of a call."""

    ring: Ring
    pair: Callable[..., Array]

    def meet(self, query_ids: Any, shard: Shard, own: Any, other: Any, same: bool) -> Callable[..., Array]:
        """The function of queries, keys and values of two parts."""
        ids = (None, None) if shard.ids is None else (query_ids[own], shard.ids[other])
        return functools.partial(self.pair, ids=ids, is_causal=self.ring.is_causal and same)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_around(
    static: _Static, query: Float[Array, "P B t N H"], shard: Shard, query_ids: Any
) -> Float[Array, "P B t N V"]:
    """The float32 sums over the keys of all devices."""
    ring = static.ring

    def visit(sums: Array, shard: Shard, number: Any) -> Array:
        for own, other, same in ring.pairs(number):
            meet = static.meet(query_ids, shard, own, other, same)
            sums = sums.at[own].add(meet(query[own], shard.key[other], shard.value[other]))
        return sums

    zeros = jnp.zeros((*query.shape[:4], shard.value.shape[4]), jnp.float32)
    return ring.around(visit, vary_like(zeros, (query, shard)), shard)


def _add_forward(static: _Static, query: Array, shard: Shard, query_ids: Any):
    return _add_around(static, query, shard, query_ids), (query, shard, query_ids)


def _add_backward(static: _Static, residuals: Any, d_sums: Array):
    query, shard, query_ids = residuals

    def pulled(shard: Shard, own: Any, other: Any, number: Any, same: bool) -> tuple[Array, Array, Array]:
        meet = static.meet(query_ids, shard, own, other, same)
        _, pull = jax.vjp(meet, query[own], shard.key[other], shard.value[other])
        return pull(d_sums[own])

    return *static.ring.gradients(query, shard, pulled), None


_add_around.defvjp(_add_forward, _add_backward)
