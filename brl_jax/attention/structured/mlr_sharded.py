"""MLR attention over rows that the devices along a mesh axis share; to be called inside `jax.shard_map`.

Keys and values go around as in `brl_jax.attention.dense.sharded`, in parts of p tokens. Where p divides a level's block
or the block divides p, two different parts share a block of the level as a whole or not at all: their scores are full
attention's with the features of the levels that they share. Smaller blocks matter where a part meets itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.full import attend
from brl_jax.attention.structured import mlr_tiles
from brl_jax.attention.structured.mlr_rectangles import rectangles
from brl_jax.sharding import current_shards, sequence_axis, shard_call


class Levels(NamedTuple):
    """What is static about a call; see `mlr_attention`.

    Attributes:
      ranks, block_sizes: of the levels.
      divide: whether scores are divided by the number of levels that contribute.
      implementation: that of the scores of different parts.
    """

    ranks: tuple[int, ...]
    block_sizes: tuple[int | None, ...]
    divide: bool
    implementation: Implementation | None

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        ids: tuple,
        lengths: Any,
        is_causal: bool,
        place: sharded.Place,
    ) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
        """A `sharded.Pair`."""
        size = query.shape[1]
        if place.same:
            within = tuple(None if block is None or block >= size else block for block in self.block_sizes)
            plan = mlr_tiles.MLRPlan(rectangles(size, self.ranks, within, is_causal), is_causal, self.divide)
            return mlr_tiles.attend(plan, query, key, value, lengths)
        factors = [self._shared(block, size, place) for block in self.block_sizes]
        if self.divide:
            count = jnp.maximum(sum(factors[1:], start=factors[0]), 1.0)
            factors = [factor / count for factor in factors]
        scales = jnp.concatenate(
            [jnp.broadcast_to(factor, (rank,)) for factor, rank in zip(factors, self.ranks)]
        )
        query = query * scales.astype(query.dtype)[None, None, None]
        return attend(
            (query, key, value, None, None, None, lengths, ids),
            sinks=None,
            query_offset=0,
            implementation=self.implementation,
            scale=1.0,
            is_causal=False,
            cap=None,
            return_residual=True,
        )

    def _shared(self, block: int | None, size: int, place: sharded.Place) -> Float[Array, ""]:
        """1 where two different parts of `size` tokens lie in one block, else 0."""
        if block is None:
            return jnp.ones((), jnp.float32)
        if block <= size:
            return jnp.zeros((), jnp.float32)
        return (place.query // block == place.key // block).astype(jnp.float32)

    def axis(self, length: int, is_causal: bool) -> str | None:
        """The mesh axis along which the keys of a call may go around; None where there is none."""
        parts = 2 if is_causal else 1
        axis = sequence_axis(length, parts)
        if axis is None:
            return None
        size = length // (current_shards("length") * parts)
        fits = all(block is None or block % size == 0 or size % block == 0 for block in self.block_sizes)
        return axis if fits else None


def mlr_on_mesh(
    levels: Levels,
    axis: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    lengths: Int[Array, " B"] | None,
    is_causal: bool,
) -> Float[Array, "B T N V"]:
    """`mlr_attention` whose scales are already in the query, of rows that are cut over `levels.axis(T, is_causal)`."""
    queries, keys = (("batch", "length", heads, None) for heads in ("heads", "kv_heads"))
    stretch = functools.partial(_stretch, sharded.Ring(axis, is_causal), levels)
    return shard_call(stretch, (query, key, value, lengths), [queries, keys, keys, ("batch",)], queries)


def _stretch(
    ring: sharded.Ring, levels: Levels, query: Array, key: Array, value: Array, lengths: Array | None
) -> Array:
    out, _ = sharded.attend_around(ring, levels, query, key, value, (None, None), lengths)
    return ring.collect(out.astype(query.dtype))
