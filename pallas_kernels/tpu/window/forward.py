"""Sliding-window attention, forward: one softmax pass over the window of each tile of queries.

Scores are held transposed (keys in rows, queries in lanes): the softmax then reduces over rows, which costs
no shuffle between lanes, and its statistics are rows that lie in memory as they are stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import heads
from pallas_kernels.tpu.core.heads import EMPTY, LOG2E, MASKED, NT, Layout
from pallas_kernels.tpu.window.plan import WindowPlan, tile_offsets


class WindowTiles:
    """What forward and backward share: the tiles of keys around one block of queries, their edges, the
    fold."""

    def __init__(self, plan: WindowPlan, layout: Layout, block_index: Int[Array, ""]):
        self.plan, self.layout, self.block_index = plan, layout, block_index
        offsets = tile_offsets(plan.tile)
        self.masks: dict[int, Any] = {d: plan.visible(d, offsets) for d in plan.distances()}

    def place(self, tile: int) -> tuple[int, int]:
        """Which block (own 0, before -1, after 1) holds a tile of keys, and its first row there."""
        plan = self.plan
        if tile < 0:
            return -1, plan.halo + tile * plan.tile
        if tile < plan.tiles:
            return 0, tile * plan.tile
        return 1, (tile - plan.tiles) * plan.tile

    def load(self, refs, tile: int) -> Float[Array, "tile width"]:
        """One tile of keys or values; rows past the end of the sequence read as zero."""
        side, row = self.place(tile)
        x = refs[side][0, row : row + self.plan.tile, :]
        if self.plan.ragged and tile >= 0:
            x = heads.rows_below(x, self.plan.length - self.first_row(tile))
        elif self.plan.length < self.plan.halo:
            # Step 0 has no block before it: it masks the first one, which is shorter than what it loads.
            x = heads.rows_below(x, self.plan.length - row)
        return x

    def first_row(self, tile: int) -> Int[Array, ""]:
        return self.block_index * self.plan.block + tile * self.plan.tile

    def guard(self, scores: Float[Array, "tile tile"], tile: int) -> Float[Array, "tile tile"]:
        """Masks a tile of scores whose keys lie before the first token or after the last."""
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
        """One array for each column of the plan out of one for each distance; `masked` fills what nobody
        sees."""
        columns = []
        for members, partial in self.plan.columns():
            x = tiles[members[0]]
            mask = self.masks[members[0]]
            if len(members) == 2:
                x = jnp.where(mask, x, tiles[members[1]])
                mask = mask | self.masks[members[1]]
            columns.append(jnp.where(mask, x, masked) if partial else x)
        return columns

    def unfold(self, columns: list[Float[Array, "tile tile"]], dtype) -> dict[int, Float[Array, "tile tile"]]:
        """Undoes `fold` for weights: what a distance does not see is zero."""
        tiles = {}
        for (members, _), x in zip(self.plan.columns(), columns):
            if len(members) == 1:
                tiles[members[0]] = x.astype(dtype)
            else:
                for d in members:
                    tiles[d] = jnp.where(self.masks[d], x, 0.0).astype(dtype)
        return tiles


def _forward_kernel(*refs, plan: WindowPlan, layout: Layout, scale: float, segments: bool):
    named = iter(refs)
    query = next(named)
    keys, values = ({side: next(named) for side in plan.sides} for _ in range(2))
    if segments:
        query_segments = next(named)
        key_segments = {side: next(named) for side in plan.sides}
    output, statistics = named
    size = plan.tile
    shared = WindowTiles(plan, layout, pl.program_id(2))
    factor = scale * LOG2E
    columns: dict[int, Array] = {}
    parts: dict[int, list[Array]] = {}

    def key_segment(tile):
        if tile not in columns:
            side, row = shared.place(tile)
            columns[tile] = heads.column(key_segments[side][0, :, row : row + size], size)
        return columns[tile]

    def score(unit):
        tile, head = divmod(unit, layout.packed)
        rows = slice(tile * size, (tile + 1) * size)
        q = heads.lanes_of_head(query[0, rows, :], head, layout)
        scores = {}
        for d in plan.distances():
            s = shared.guard(heads.dot(shared.load(keys, tile + d), q, NT), tile + d)
            if segments:
                s = jnp.where(key_segment(tile + d) == query_segments[0, :, rows], s, MASKED)
            scores[d] = s
        return (shared.fold(scores, MASKED),)

    def normalise(unit, scores):
        top = functools.reduce(jnp.maximum, scores).max(axis=0, keepdims=True)
        weights = [jnp.exp2((s - top) * factor) for s in scores]
        total = functools.reduce(jnp.add, weights).sum(axis=0, keepdims=True)
        return shared.unfold(weights, query.dtype), top, total

    def read_out(unit, weights, top, total):
        tile, head = divmod(unit, layout.packed)
        rows = slice(tile * size, (tile + 1) * size)
        v = jnp.concatenate([shared.load(values, tile + d) for d in plan.distances()], axis=0)
        p = jnp.concatenate([weights[d] for d in plan.distances()], axis=0)
        out = heads.turned_product(v, p, head, layout)
        out *= heads.reciprocal(total)
        log_total = jnp.log2(total)
        if segments:
            seen = top > 0.5 * MASKED
            out = jnp.where(seen, out, 0.0)
            top, log_total = jnp.where(seen, top, 0.0), jnp.where(seen, log_total, EMPTY)
        statistics[0, 0, head : head + 1, rows] = top
        statistics[0, 0, layout.packed + head : layout.packed + head + 1, rows] = log_total
        parts.setdefault(tile, []).append(out)
        if head + 1 == layout.packed:
            whole = jnp.concatenate(parts.pop(tile), axis=0)
            output[0, rows, :] = whole.T.astype(output.dtype)

    heads.pipelined(plan.tiles * layout.packed, score, normalise, read_out)


def key_specs(plan: WindowPlan, width: int, block_of: Callable) -> list[pl.BlockSpec]:
    """The blocks of `plan.sides` around block_of(step), out of an array laid out (batch, length, tiles * width)."""

    def spec(side):
        return pl.BlockSpec(
            (1, plan.halo if side else plan.block, width),
            lambda b, t, i, r: (b, _key_block(plan, side, block_of(i)), t),
        )

    return [spec(side) for side in plan.sides]


def segment_specs(plan: WindowPlan, block_of: Callable) -> list[pl.BlockSpec]:
    """As `key_specs`, for ids laid out (batch, 1, length)."""

    def spec(side):
        return pl.BlockSpec(
            (1, 1, plan.halo if side else plan.block),
            lambda b, t, i, r: (b, 0, _key_block(plan, side, block_of(i))),
        )

    return [spec(side) for side in plan.sides]


def _key_block(plan: WindowPlan, side: int, block):
    """Which block of keys, of the size that a side has, lies beside a block; at the sequence's ends one that exists."""
    if side == 0:
        return block
    ratio, last = plan.block // plan.halo, -(-plan.length // plan.halo) - 1
    return jnp.clip(block * ratio - 1 if side < 0 else (block + 1) * ratio, 0, last)


def _in_order(step):
    """The forward pass takes the blocks as they come."""
    return step


def forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B T M"],
    value: Float[Array, "B T M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 T"]] | None,
    *,
    plan: WindowPlan,
    layout: Layout,
    scale: float,
    vmem_limit: int | None,
    interpret,
) -> tuple[Float[Array, "B T L"], Float[Array, "B tiles 2*packed T"]]:
    """Output and statistics of packed arrays; see `heads.pack` and `heads.log_sum_exp`.

    The statistics are, for each packed head, the largest score before scaling, then the base-2 log of the
    sum of exponentials over that largest one. Their sum would round away what the backward pass needs at
    large scores.
    """
    batch, length, lanes = query.shape
    tiles = lanes // layout.width
    specs = [
        pl.BlockSpec((1, plan.block, layout.width), lambda b, t, i, r: (b, i, t * layout.group + r)),
        *key_specs(plan, layout.width, _in_order),
        *key_specs(plan, layout.width, _in_order),
    ]
    sides = len(plan.sides)
    operands = [query, *[key] * sides, *[value] * sides]
    if segments is not None:
        query_segments, key_segments = segments
        specs += [
            pl.BlockSpec((1, 1, plan.block), lambda b, t, i, r: (b, 0, i)),
            *segment_specs(plan, _in_order),
        ]
        operands += [query_segments, *[key_segments] * sides]
    pairs = plan.blocks * plan.tiles * len(plan.distances()) * plan.tile**2 * batch * tiles * layout.packed
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, plan=plan, layout=layout, scale=scale, segments=segments is not None
        ),
        grid=(batch, tiles // layout.group, plan.blocks, layout.group),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((1, plan.block, layout.width), lambda b, t, i, r: (b, i, t * layout.group + r)),
            pl.BlockSpec(
                (1, 1, 2 * layout.packed, plan.block), lambda b, t, i, r: (b, t * layout.group + r, 0, i)
            ),
        ],
        out_shape=[
            heads.result(query.shape, query.dtype, query),
            heads.result((batch, tiles, 2 * layout.packed, length), jnp.float32, query),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4, vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * layout.head_dim,
            transcendentals=pairs,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (query, key, value, query)),
        ),
        interpret=interpret,
        name="window_attention_forward",
    )(*operands)
