"""MLR attention over rows that devices along a mesh axis share; call it inside `jax.shard_map`.

Keys and values go around as in `brl_jax.attention.dense.sharded`, in parts of p tokens. If p divides a level's block or
the block divides p, two different parts share either a whole block of the level or nothing. Their scores are then full
attention's scores with the features of the shared levels. Smaller blocks matter only where a part meets itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.attend import attend
from brl_jax.attention.dense.full_xla import FullArrays
from brl_jax.attention.structured import mlr_tiles
from brl_jax.attention.structured.mlr_rectangles import rectangles
from brl_jax.sharding import current_shards, sequence_axis, shard_call


class Levels(NamedTuple):
    """The static part of a call; see `mlr_attention`.

    Attributes:
      ranks, block_sizes: of the levels.
      implementation: for the scores between different parts.
    """

    ranks: tuple[int, ...]
    block_sizes: tuple[int | None, ...]
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
            plan = mlr_tiles.MLRPlan(rectangles(size, self.ranks, within, is_causal), is_causal)
            return mlr_tiles.attend(plan, query, key, value, lengths)
        factors = [self._shared(block, size, place) for block in self.block_sizes]
        scales = jnp.concatenate(
            [jnp.broadcast_to(factor, (rank,)) for factor, rank in zip(factors, self.ranks)]
        )
        query = query * scales.astype(query.dtype)[None, None, None]
        return attend(
            FullArrays(query, key, value, key_lengths=lengths, segments=ids),
            implementation=self.implementation,
            scale=1.0,
            is_causal=False,
            cap=None,
            return_residual=True,
        )

    def _shared(self, block: int | None, size: int, place: sharded.Place) -> Float[Array, ""]:
        """1 if two different parts of `size` tokens lie in one block, else 0."""
        if block is None:
            return jnp.ones((), jnp.float32)
        if block <= size:
            return jnp.zeros((), jnp.float32)
        return (place.query // block == place.key // block).astype(jnp.float32)

    def axis(self, length: int, is_causal: bool) -> str | None:
        """The mesh axis along which the keys of a call can go around, or None."""
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
    """`mlr_attention` on rows sharded over `levels.axis(T, is_causal)`, with scaled queries."""
    queries, keys = (("batch", "length", heads, None) for heads in ("heads", "kv_heads"))
    shard = functools.partial(_shard, sharded.Ring(axis, is_causal), levels)
    return shard_call(shard, (query, key, value, lengths), [queries, keys, keys, ("batch",)], queries)


def _shard(
    ring: sharded.Ring, levels: Levels, query: Array, key: Array, value: Array, lengths: Array | None
) -> Array:
    out, _ = sharded.attend_around(ring, levels, query, key, value, (None, None), lengths)
    return ring.collect(out.astype(query.dtype))
