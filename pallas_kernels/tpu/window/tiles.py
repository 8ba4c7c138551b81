"""Shared by the forward and backward kernels of sliding-window attention: the tiles of keys around one block of
queries, and the block specs that fetch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import arithmetic
from pallas_kernels.tpu.core.arithmetic import MASKED, NT
from pallas_kernels.tpu.window.plan import WindowPlan, tile_offsets


class WindowTiles:
    """The tiles of keys around one block of queries, inside a kernel: where they lie, their edges, their segments."""

    def __init__(self, plan: WindowPlan, block_index: Int[Array, ""], segments: Any, cap: float | None):
        """`segments` are references to the ids of the queries and, by side, of the keys; None without ids.

        `cap` bounds unscaled scores; None leaves them unbounded.
        """
        self.plan, self.block_index, self.segments, self.cap = plan, block_index, segments, cap
        offsets = tile_offsets(plan.tile)
        self.masks: dict[int, Any] = {d: plan.visible(d, offsets) for d in plan.distances()}
        self._columns: dict[int, Array] = {}

    def place(self, tile: int) -> tuple[int, int]:
        """Returns the block (own 0, before -1, after 1) that holds a tile of keys, and the tile's first row there."""
        plan = self.plan
        if tile < 0:
            return -1, plan.halo + tile * plan.tile
        if tile < plan.tiles:
            return 0, tile * plan.tile
        return 1, (tile - plan.tiles) * plan.tile

    def load(self, refs, tile: int) -> Float[Array, "tile width"]:
        """Loads one tile of keys or values; rows past the end of the sequence read as zero."""
        side, row = self.place(tile)
        x = refs[side][0, row : row + self.plan.tile, :]
        if self.plan.ragged and tile >= 0:
            x = arithmetic.rows_below(x, self.plan.length - self.first_row(tile))
        elif self.plan.length < self.plan.halo:
            # Step 0 has no block before it: it masks the first one, which is shorter than what it loads.
            x = arithmetic.rows_below(x, self.plan.length - row)
        return x

    def first_row(self, tile: int) -> Int[Array, ""]:
        """Returns the position of a tile's first token in the sequence."""
        return self.block_index * self.plan.block + tile * self.plan.tile

    def scores(self, keys, query: Float[Array, "tile width"], tile: int, distance: int):
        """Returns the scores, keys in rows, of a tile of queries and the tile of keys at a distance; MASKED where the
        key does not exist or belongs to another segment. `fold` masks what is outside the window."""
        size = self.plan.tile
        other = tile + distance
        scores = arithmetic.dot(self.load(keys, other), query, NT)
        if self.cap is not None:
            scores = arithmetic.soft_cap(scores, self.cap)
        scores = self._guard(scores, other)
        if self.segments is None:
            return scores
        query_segments, key_segments = self.segments
        if other not in self._columns:
            side, row = self.place(other)
            self._columns[other] = arithmetic.column(key_segments[side][0, :, row : row + size], size)
        rows = slice(tile * size, (tile + 1) * size)
        return jnp.where(self._columns[other] == query_segments[0, :, rows], scores, MASKED)

    def _guard(self, scores: Float[Array, "tile tile"], tile: int) -> Float[Array, "tile tile"]:
        """Masks a tile of scores whose keys are before the first token or after the last."""
        plan = self.plan
        if tile < 0:
            scores += jnp.where(self.first_row(tile) < 0, MASKED, 0.0).astype(jnp.float32)
        if plan.after and plan.length % plan.tile:
            row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            scores = jnp.where(row < plan.length - self.first_row(tile), scores, MASKED)
        elif plan.after and (plan.ragged or tile >= plan.tiles):
            scores += jnp.where(self.first_row(tile) >= plan.length, MASKED, 0.0).astype(jnp.float32)
        return scores

    def fold(
        self, tiles: dict[int, Float[Array, "tile tile"]], masked: float
    ) -> list[Float[Array, "tile tile"]]:
        """Returns one array for each column of the plan, from one for each distance; entries that no query sees are
        `masked`."""
        columns = []
        for members, partial in self.plan.columns():
            x = tiles[members[0]]
            mask = self.masks[members[0]]
            if len(members) == 2:
                x = jnp.where(mask, x, tiles[members[1]])
                mask = mask | self.masks[members[1]]
            columns.append(jnp.where(mask, x, masked) if partial else x)
        return columns

    def unfolded(self, columns: list[Float[Array, "tile tile"]]) -> dict[int, Float[Array, "tile tile"]]:
        """Inverts `fold` for arrays that are zero outside the window: returns one for each distance."""
        tiles = {}
        for (members, _), x in zip(self.plan.columns(), columns):
            for d in members:
                tiles[d] = x if len(members) == 1 else jnp.where(self.masks[d], x, 0.0)
        return tiles

    def unfold(self, columns: list[Float[Array, "tile tile"]], dtype) -> Float[Array, "keys tile"]:
        """`unfolded` for weights: the tiles of all distances, one below the other."""
        tiles = self.unfolded(columns)
        # Converting tile by tile takes five vector instructions for two registers on a v5e instead of one.
        return jnp.concatenate([tiles[d] for d in self.plan.distances()], axis=0).astype(dtype)


def key_specs(plan: WindowPlan, width: int, block_of: Callable) -> list[pl.BlockSpec]:
    """Returns the specs of the blocks at `plan.sides` around block_of(step), of an array (batch, length, tiles *
    width)."""

    def spec(side):
        return pl.BlockSpec(
            (1, plan.halo if side else plan.block, width),
            lambda b, t, i, r: (b, _key_block(plan, side, block_of(i)), t),
        )

    return [spec(side) for side in plan.sides]


def segment_specs(plan: WindowPlan, block_of: Callable) -> list[pl.BlockSpec]:
    """Returns the specs of the ids (batch, 1, length) of block_of(step)'s queries, and of the keys as `key_specs`."""

    def spec(side):
        return pl.BlockSpec(
            (1, 1, plan.halo if side else plan.block),
            lambda b, t, i, r: (b, 0, _key_block(plan, side, block_of(i))),
        )

    own = pl.BlockSpec((1, 1, plan.block), lambda b, t, i, r: (b, 0, block_of(i)))
    return [own, *(spec(side) for side in plan.sides)]


def _key_block(plan: WindowPlan, side: int, block):
    """Returns the block of keys next to a block, in units of its side's block size; clipped at the ends of the
    sequence."""
    if side == 0:
        return block
    ratio, last = plan.block // plan.halo, -(-plan.length // plan.halo) - 1
    return jnp.clip(block * ratio - 1 if side < 0 else (block + 1) * ratio, 0, last)


def pairs_computed(plan: WindowPlan, batch: int, heads: int) -> int:
    """Returns how many pairs of a query and a key a pass computes a score for, for the compiler's cost estimate."""
    return plan.blocks * plan.tiles * len(plan.distances()) * plan.tile**2 * batch * heads
