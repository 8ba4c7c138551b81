"""Forward and backward of MLR attention over its rectangles, as one differentiable function.

Each rectangle is dense attention of its queries on its keys, some rows at a time; the softmax over all of them comes
from each one's output and log-sum-exp. The backward pass is written by hand: it saves the output and the log-sum-exp
and computes the scores anew (as FlashAttention does, Dao et al. 2022, arXiv 2205.14135, section 3.1). On a CPU a loop
takes as many rectangles as keep their scores in cache; elsewhere all rectangles of a kind go at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.products import merge_heads, split_heads
from brl_jax.attention.core.softmax import MASKED
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.structured.mlr_blocks import Rectangle

# The scores of one step of the CPU's loop, in bytes: about what stays in the second-level caches.
_CACHE_BYTES = 2**21
# Rows of scores (queries times heads of a group) at a time elsewhere.
_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static side of one call; `divide`: scores are divided by the number of their active levels."""

    rectangles: tuple[Rectangle, ...]
    is_causal: bool
    divide: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    spec: Spec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    lengths: Int[Array, "B"] | None,
) -> Float[Array, "B T N V"]:
    """Attention with the scores' scales already in the query; keys from `lengths` on are not seen."""
    return _forward(spec, query, key, value, lengths)[0]


def _attend_forward(spec, query, key, value, lengths):
    out, lse = _forward(spec, query, key, value, lengths)
    return out, (query, key, value, lengths, out, lse)


def _attend_backward(spec, saved, d_out):
    query, key, value, lengths, out, lse = saved
    return *_backward(spec, query, key, value, lengths, out, lse, d_out), None


attend.defvjp(_attend_forward, _attend_backward)


def _forward(spec: Spec, query, key, value, lengths) -> tuple[Array, Array]:
    """out (B, T, N, V) and log-sum-exp (B, K, G, T), which is -MASKED for rows that see nothing."""
    length, kv_heads = query.shape[1], key.shape[2]

    def run(loop: bool, query, key, value, lengths):
        q = split_heads(query, kv_heads)
        k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
        total = None
        for rectangle in spec.rectangles:
            tiling = _Tiling.of(rectangle, q, loop)
            keys, visible = tiling.keys(k), tiling.visible(spec, lengths, q)
            arrays = (tiling.rows(q[..., : rectangle.width]), keys, tiling.values(v), visible)
            out, lse = tiling.groups(functools.partial(_tiles_forward, spec, tiling), arrays)
            part = (
                tiling.restore_rows(out, length),
                tiling.restore_rows(lse[..., None], length, MASKED)[..., 0],
            )
            total = part if total is None else _combine([total, part])
        assert total is not None
        out, lse = total
        # A row that sees nothing gets weights exp(score - huge) = 0 in the backward pass.
        return merge_heads(out).astype(query.dtype), jnp.where(lse == MASKED, -MASKED, lse)

    return lax.platform_dependent(
        query, key, value, lengths, cpu=functools.partial(run, True), default=functools.partial(run, False)
    )


def _combine(results: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Softmax over the union of parts, from each part's output and log-sum-exp."""
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results)
    top = functools.reduce(jnp.maximum, lses)
    weights = [jnp.where(lse == MASKED, 0.0, jnp.exp(lse - top)) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    sees = top > MASKED / 2
    total = jnp.where(sees, total, 1.0)
    weighted = [(w / total)[..., None] * out for w, out in zip(weights, outs)]
    return sum(weighted[1:], start=weighted[0]), jnp.where(sees, top + jnp.log(total), MASKED)


def _backward(spec: Spec, query, key, value, lengths, out, lse, d_out):
    """Gradients of query, key and value."""
    length, kv_heads = query.shape[1], key.shape[2]

    def run(loop: bool, query, key, value, lengths, out, lse, d_out):
        q, o, do = (split_heads(x, kv_heads) for x in (query, out, d_out))
        k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
        sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        for rectangle in spec.rectangles:
            tiling = _Tiling.of(rectangle, q, loop)
            width = rectangle.width
            arrays = (
                tiling.rows(q[..., :width]),
                tiling.keys(k),
                tiling.values(v),
                tiling.visible(spec, lengths, q),
                tiling.rows(do),
                tiling.rows(lse[..., None], -MASKED)[..., 0],
                tiling.rows(delta[..., None])[..., 0],
            )
            dq, dk, dv = tiling.groups(functools.partial(_tiles_backward, spec, tiling), arrays)
            pieces = (
                tiling.restore_rows(dq, length),
                tiling.restore_keys(dk, length),
                tiling.restore_keys(dv, length),
            )
            sums = [
                total + jnp.pad(piece, [(0, 0)] * (piece.ndim - 1) + [(0, total.shape[-1] - piece.shape[-1])])
                for total, piece in zip(sums, pieces)
            ]
        dq, dk, dv = sums
        dk, dv = (x.transpose(0, 2, 1, 3) for x in (dk, dv))
        return merge_heads(dq).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)

    return lax.platform_dependent(
        query, key, value, lengths, out, lse, d_out,
        cpu=functools.partial(run, True), default=functools.partial(run, False),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How one kind of rectangle is walked over.

    Arrays of queries become (*Z, tiles, rows, F) with the heads of a group and `tile` queries as rows; arrays of keys
    (*Z, keys, F). Z is (batch, key heads, blocks), or (steps, rectangles of a step) in the CPU's loop.
    """

    rectangle: Rectangle
    batch: int
    heads: int
    group: int
    tile: int
    tiles: int
    together: int | None  # rectangles in a step of the loop; None: no loop

    @classmethod
    def of(cls, rectangle: Rectangle, query: Array, loop: bool) -> _Tiling:
        batch, heads, group = query.shape[:3]
        size = rectangle.num_queries
        if loop:
            rows = _CACHE_BYTES // (4 * rectangle.num_keys)
            tile = min(size, max(32, _power_of_two(rows // group)))
        else:
            tile = min(size, max(1, _ROWS // group))
        tiles = -(-size // tile)
        tile = -(-size // tiles)
        together = None
        if loop:
            every = batch * heads * rectangle.blocks
            limit = max(1, _CACHE_BYTES // (4 * group * tile * rectangle.num_keys))
            together = max(n for n in range(1, min(every, limit) + 1) if every % n == 0)
        return cls(rectangle, batch, heads, group, tile, tiles, together)

    def rows(self, x: Float[Array, "B K G T F"], fill: float = 0) -> Array:
        x = self.rectangle.cut(x, 3, self.rectangle.query)
        missing = self.tiles * self.tile - self.rectangle.num_queries
        if missing:
            x = jnp.pad(x, [(0, 0)] * 4 + [(0, missing), (0, 0)], constant_values=fill)
        x = x.reshape(*x.shape[:4], self.tiles, self.tile, x.shape[-1])
        x = x.transpose(0, 1, 3, 4, 2, 5, 6)  # (B, K, blocks, tiles, G, tile, F)
        return self._split(x.reshape(*x.shape[:4], self.group * self.tile, x.shape[-1]))

    def restore_rows(self, x: Array, length: int, fill: float = 0) -> Float[Array, "B K G T F"]:
        r = self.rectangle
        x = x.reshape(self.batch, self.heads, r.blocks, self.tiles, self.group, self.tile, x.shape[-1])
        x = x.transpose(0, 1, 4, 2, 3, 5, 6)
        x = x.reshape(*x.shape[:4], self.tiles * self.tile, x.shape[-1])[..., : r.num_queries, :]
        return r.restore(x, 3, r.query, length, fill)

    def keys(self, x: Float[Array, "B K T F"]) -> Array:
        return self.values(x[..., : self.rectangle.width])

    def values(self, x: Float[Array, "B K T F"]) -> Array:
        return self._split(self.rectangle.cut(x, 2, self.rectangle.key))

    def restore_keys(self, x: Array, length: int) -> Float[Array, "B K T F"]:
        """From gradients (*Z, F, keys)."""
        r = self.rectangle
        x = x.reshape(self.batch, self.heads, r.blocks, *x.shape[-2:]).swapaxes(3, 4)
        return r.restore(x, 2, r.key, length)

    def visible(self, spec: Spec, lengths: Array | None, query: Array) -> Array | None:
        """How many of its keys each rectangle's queries may see, (*Z,); None where all."""
        r = self.rectangle
        last = (r.blocks - 1) * r.period + r.key[1]
        length = query.shape[3]
        # A query sees no key after itself, so that keys after the last query need no care.
        if lengths is None and (spec.is_causal or last <= length):
            return None
        limit = jnp.full((self.batch,), length, jnp.int32) if lengths is None else lengths
        first = jnp.arange(r.blocks, dtype=jnp.int32)[None] * r.period + r.key[0]
        count = jnp.clip(limit[:, None] - first, 0, r.num_keys)
        count = jnp.broadcast_to(count[:, None], (self.batch, self.heads, r.blocks))
        return self._split(count)

    def _split(self, x: Array) -> Array:
        """(B, K, blocks, ...) as (*Z, ...)."""
        if self.together is None:
            return x
        steps = math.prod(x.shape[:3]) // self.together
        return x.reshape(steps, self.together, *x.shape[3:])

    def groups(self, function: Any, arrays: tuple) -> Any:
        """function(*arrays), on each step's rectangles in a loop or on all at once."""
        if self.together is None:
            return function(*arrays)
        steps = arrays[0].shape[0]
        if steps == 1:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], arrays)))
        return lax.map(lambda step: function(*step), arrays)


def _power_of_two(number: int) -> int:
    """The largest one up to a number."""
    return 1 << max(0, number.bit_length() - 1)


def _align(x: Array, other: Array) -> Array:
    """x with leading axes of size 1, as many as `other` has more."""
    return x.reshape((1,) * (other.ndim - x.ndim) + x.shape)


def _dot(x: Array, y: Array, subscripts: str) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


class _Tile:
    """One tile's pairs: scores, and what they were made of."""

    def __init__(self, spec: Spec, tiling: _Tiling, number: Any):
        r = tiling.rectangle
        self.rectangle = r
        row = (jnp.arange(tiling.group * tiling.tile, dtype=jnp.int32) % tiling.tile + number * tiling.tile)[
            :, None
        ]
        column = jnp.arange(r.num_keys, dtype=jnp.int32)[None, :]
        self.causal = row >= column if r.diagonal and spec.is_causal else None
        self.column = column
        self.levels = [(start, stop, row // size == column // size) for start, stop, size in r.finer]
        self.weight: Array | None = None
        if spec.divide and r.finer:
            count = sum((same.astype(jnp.float32) for _, _, same in self.levels), start=jnp.float32(r.levels))
            self.weight = 1.0 / jnp.maximum(count, 1.0)
        elif spec.divide and r.levels > 1:
            self.weight = jnp.float32(1.0 / r.levels)

    def scores(self, query: Array, key: Array, visible: Array | None) -> Array:
        r = self.rectangle
        scores = _dot(query[..., : r.features], key[..., : r.features], "...td,...sd->...ts")
        for start, stop, same in self.levels:
            level = _dot(query[..., start:stop], key[..., start:stop], "...td,...sd->...ts")
            scores = scores + jnp.where(_align(same, level), level, 0.0)
        if self.weight is not None:
            scores = scores * _align(self.weight, scores)
        if self.causal is not None:
            scores = jnp.where(_align(self.causal, scores), scores, MASKED)
        if visible is not None:
            scores = jnp.where(_align(self.column, scores) < visible[..., None, None], scores, MASKED)
        return scores

    def gradients(self, d_scores: Array, query_t: Array, key: Array) -> tuple[Array, Array]:
        """Of the query (rows, F) and of the key (F, keys)."""
        r, dtype = self.rectangle, key.dtype
        if self.weight is not None:
            d_scores = d_scores * _align(self.weight, d_scores)
        pieces = [(0, r.features, d_scores)]
        pieces += [
            (start, stop, jnp.where(_align(same, d_scores), d_scores, 0.0))
            for start, stop, same in self.levels
        ]
        d_query = [
            _dot(d.astype(dtype), key[..., start:stop], "...ts,...sd->...td") for start, stop, d in pieces
        ]
        d_key = [
            _dot(query_t[..., start:stop, :], d.astype(dtype), "...dt,...ts->...ds")
            for start, stop, d in pieces
        ]
        return jnp.concatenate(d_query, -1), jnp.concatenate(d_key, -2)


def _tiles_forward(
    spec: Spec, tiling: _Tiling, query: Array, key: Array, value: Array, visible: Array | None
) -> tuple[Array, Array]:
    """Outputs (*Z, tiles, rows, V) in float32 and log-sum-exps (*Z, tiles, rows) of all tiles."""

    def one(tile: tuple[Array, Array]) -> tuple[Array, Array]:
        number, query = tile
        scores = _Tile(spec, tiling, number).scores(query, key, visible)
        top = lax.max(jnp.max(scores, -1), jnp.float32(MASKED))
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, -1)
        out = _dot(weights.astype(value.dtype), value, "...ts,...sv->...tv")
        sees = top > MASKED / 2
        total = jnp.where(sees, total, 1.0)
        out = jnp.where(sees[..., None], out * (1.0 / total)[..., None], 0.0)
        return out, jnp.where(sees, top + jnp.log(total), MASKED)

    axis = query.ndim - 3
    if tiling.tiles == 1:
        out, lse = one((jnp.int32(0), query.squeeze(axis)))
        return jnp.expand_dims(out, axis), jnp.expand_dims(lse, axis)
    numbers = jnp.arange(tiling.tiles, dtype=jnp.int32)
    out, lse = lax.map(one, (numbers, jnp.moveaxis(query, axis, 0)))
    return jnp.moveaxis(out, 0, axis), jnp.moveaxis(lse, 0, axis)


def _tiles_backward(spec: Spec, tiling: _Tiling, query, key, value, visible, d_out, lse, delta):
    """Gradients of the query (*Z, tiles, rows, F), the key (*Z, F, keys) and the value (*Z, V, keys), in float32."""

    def one(sums, tile):
        number, query, d_out, lse, delta = tile
        pairs = _Tile(spec, tiling, number)
        weights = jnp.exp(pairs.scores(query, key, visible) - lse[..., None])
        d_weights = _dot(d_out, value, "...tv,...sv->...ts")
        d_scores = weights * (d_weights - delta[..., None])
        d_query, d_key = pairs.gradients(d_scores, query.swapaxes(-1, -2), key)
        d_value = _dot(d_out.swapaxes(-1, -2), weights.astype(value.dtype), "...vt,...ts->...vs")
        return (sums[0] + d_key, sums[1] + d_value), d_query

    axis = query.ndim - 3
    d_key, d_value = (
        vary_like(jnp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), jnp.float32), [query, key, value])
        for x in (key, value)
    )
    tiles = (query, d_out, lse, delta)
    if tiling.tiles == 1:
        (d_key, d_value), d_query = one((d_key, d_value), (jnp.int32(0), *(x.squeeze(axis) for x in tiles)))
        return jnp.expand_dims(d_query, axis), d_key, d_value
    numbers = jnp.arange(tiling.tiles, dtype=jnp.int32)
    (d_key, d_value), d_query = lax.scan(
        one, (d_key, d_value), (numbers, *(jnp.moveaxis(x, axis, 0) for x in tiles))
    )
    return jnp.moveaxis(d_query, 0, axis), d_key, d_value
