"""MLR attention over its rectangles, a tile of scores at a time, with a custom gradient.

Each rectangle is dense attention of its queries to its keys, a few rows at a time, and the results of all rectangles
merge into one softmax. The backward pass saves each row's output and log-sum-exp and recomputes the scores, as in
FlashAttention (Dao et al. 2022, arXiv:2205.14135, section 3.1). On a CPU, a loop takes only so many rectangles at a
time that their scores stay in cache; elsewhere all rectangles of a kind are computed at once.
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

from brl_jax.attention.core.by_platform import Form, by_platform
from brl_jax.attention.core.products import CACHE_BYTES, merge_heads, split_heads
from brl_jax.attention.core.softmax import MASKED, block_sums, normalise, softmax_gradient
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.structured.mlr_rectangles import Rectangle

# Rows of scores (queries times heads of a group) in a tile, without a loop over rectangles.
_ROWS = 128


@dataclasses.dataclass(frozen=True)
class MLRPlan:
    """The static part of a call.

    Attributes:
      rectangles: contain every visible pair once.
      is_causal: whether to mask pairs above the diagonal of a square.
    """

    rectangles: tuple[Rectangle, ...]
    is_causal: bool


# Compiled separately, so that repeated calls outside jit trace it only once.
@functools.partial(jax.jit, static_argnums=0)
def attend(
    plan: MLRPlan,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    lengths: Int[Array, "B"] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention for scaled queries; keys at and after `lengths` are not visible.

    Also returns the float32 log-sum-exp of each query's scores, -inf if it sees no key.
    """

    batch, length, heads, _ = query.shape
    on_cpu, elsewhere = _form(plan, True), _form(plan, False)
    return by_platform(
        lambda platform, *_: on_cpu if platform == "cpu" else elsewhere,
        query,
        key,
        value,
        lengths,
        results=(
            jax.ShapeDtypeStruct((batch, length, heads, value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((batch, length, heads), jnp.float32),
        ),
        kept=jax.ShapeDtypeStruct((batch, key.shape[2], heads // key.shape[2], length), jnp.float32),
        plain=lambda *operands: elsewhere.run(*operands)[0],
    )


def _form(plan: MLRPlan, loop: bool) -> Form:
    """The form that saves the log-sum-exp of each row (B, K, G, T), -MASKED if it sees no key."""

    def run(*operands: Any) -> tuple[tuple[Array, Array], Array]:
        out, lse = _forward(plan, *operands, loop=loop)
        sums = jnp.moveaxis(lse.reshape(lse.shape[0], -1, lse.shape[3]), 1, 2)
        return (out, jnp.where(sums == -MASKED, -jnp.inf, sums)), lse

    def gradient(operands: Any, results: Any, lse: Array, d_results: Any) -> tuple[Array, Array, Array, None]:
        d_out, d_sums = d_results
        d_lse = jnp.where(lse == -MASKED, 0.0, jnp.moveaxis(d_sums, 2, 1).reshape(lse.shape))
        query, key, value, lengths = operands
        d = _backward(plan, query, key, value, lengths, results[0], lse, d_out, d_lse, loop=loop)
        return *d, None

    return Form(run, gradient)


def _forward(
    plan: MLRPlan, query: Array, key: Array, value: Array, lengths: Array | None, *, loop: bool
) -> tuple[Float[Array, "B T N V"], Float[Array, "B K G T"]]:
    """The output and log-sum-exp of each row, -MASKED for rows that see no key.

    Args:
      loop: whether to loop over the rectangles.
    """
    length, kv_heads = query.shape[1], key.shape[2]
    q = split_heads(query, kv_heads)
    k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
    total = None
    for rectangle in plan.rectangles:
        tiling = _RectangleTiling.of(rectangle, q, loop)
        keys, visible = tiling.keys(k), tiling.visible(plan, lengths, q)
        arrays = (tiling.rows(q[..., : rectangle.width]), keys, tiling.values(v), visible)
        out, lse = tiling.groups(functools.partial(_tiles_forward, plan, tiling), arrays)
        lse = tiling.restore_rows(lse[..., None], length, MASKED)[..., 0]
        part = (tiling.restore_rows(out, length), lse)
        total = part if total is None else _merge_normalised([total, part])
    assert total is not None
    out, lse = total
    # In the backward pass, rows that see no key then have weights exp(score - huge) = 0.
    lse = jnp.where(lse == MASKED, -MASKED, lse)
    return merge_heads(out).astype(query.dtype), lse


def _merge_normalised(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merges the outputs and log-sum-exps of all parts.

    `merge_sums` would do the same without a division per part, but XLA then schedules the loops so that forward and
    backward together take 8% more memory at 32k tokens.
    """
    outs, lses = zip(*parts)
    top = functools.reduce(jnp.maximum, lses)
    weights = [jnp.where(lse == MASKED, 0.0, jnp.exp(lse - top)) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    sees = top > MASKED / 2
    total = jnp.where(sees, total, 1.0)
    weighted = [(weight / total)[..., None] * out for weight, out in zip(weights, outs)]
    return sum(weighted[1:], start=weighted[0]), jnp.where(sees, top + jnp.log(total), MASKED)


def _backward(plan: MLRPlan, query, key, value, lengths, out, lse, d_out, d_lse, *, loop: bool):
    length, kv_heads = query.shape[1], key.shape[2]
    q, o, do = (split_heads(x, kv_heads) for x in (query, out, d_out))
    k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1) - d_lse
    sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    for rectangle in plan.rectangles:
        tiling = _RectangleTiling.of(rectangle, q, loop)
        width = rectangle.width
        arrays = (
            tiling.rows(q[..., :width]),
            tiling.keys(k),
            tiling.values(v),
            tiling.visible(plan, lengths, q),
            tiling.rows(do),
            tiling.rows(lse[..., None], -MASKED)[..., 0],
            tiling.rows(delta[..., None])[..., 0],
        )
        dq, dk, dv = tiling.groups(functools.partial(_tiles_backward, plan, tiling), arrays)
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


@dataclasses.dataclass(frozen=True)
class _RectangleTiling:
    """How the copies of a rectangle, in each block of each head and sequence, are cut into tiles and loop steps.

    Arrays of queries become (*Z, tiles, rows, F), where a row is one of `tile` queries in one head of a group.
    Arrays of keys become (*Z, keys, F). Z is (batch, key heads, blocks), or in a CPU's loop (steps, rectangles per
    step).

    Attributes:
      rectangle, batch, heads, group: the rectangle, and the sizes B, K and G.
      tile, tiles: queries in a tile, and tiles in a rectangle.
      together: rectangles in a step of the loop; None without a loop.
    """

    rectangle: Rectangle
    batch: int
    heads: int
    group: int
    tile: int
    tiles: int
    together: int | None

    @classmethod
    def of(cls, rectangle: Rectangle, query: Array, loop: bool) -> _RectangleTiling:
        batch, heads, group = query.shape[:3]
        size = rectangle.num_queries
        if loop:
            rows = CACHE_BYTES // (4 * rectangle.num_keys)
            tile = min(size, max(32, _power_of_two(rows // group)))
        else:
            tile = min(size, max(1, _ROWS // group))
        tiles = -(-size // tile)
        tile = -(-size // tiles)
        together = None
        if loop:
            every = batch * heads * rectangle.blocks
            limit = max(1, CACHE_BYTES // (4 * group * tile * rectangle.num_keys))
            together = max(n for n in range(1, min(every, limit) + 1) if every % n == 0)
        return cls(rectangle, batch, heads, group, tile, tiles, together)

    def rows(self, x: Float[Array, "B K G T F"], fill: float | int = 0) -> Array:
        x = self.rectangle.cut(x, 3, self.rectangle.query)
        missing = self.tiles * self.tile - self.rectangle.num_queries
        if missing:
            x = jnp.pad(x, [(0, 0)] * 4 + [(0, missing), (0, 0)], constant_values=fill)
        x = x.reshape(*x.shape[:4], self.tiles, self.tile, x.shape[-1])
        x = x.transpose(0, 1, 3, 4, 2, 5, 6)  # (B, K, blocks, tiles, G, tile, F)
        return self._split(x.reshape(*x.shape[:4], self.group * self.tile, x.shape[-1]))

    def restore_rows(self, x: Array, length: int, fill: float | int = 0) -> Float[Array, "B K G T F"]:
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
        """The inverse of `keys` or `values`, for gradients (*Z, F, keys)."""
        r = self.rectangle
        x = x.reshape(self.batch, self.heads, r.blocks, *x.shape[-2:]).swapaxes(3, 4)
        return r.restore(x, 2, r.key, length)

    def visible(self, plan: MLRPlan, lengths: Array | None, query: Array) -> Array | None:
        """How many keys each rectangle's queries may see, (*Z,); None if all."""
        r = self.rectangle
        last = (r.blocks - 1) * r.period + r.key[1]
        length = query.shape[3]
        # A causal query sees no key after itself, so it never sees the padding of the last block.
        if lengths is None and (plan.is_causal or last <= length):
            return None
        limit = jnp.full((self.batch,), length, jnp.int32) if lengths is None else lengths
        first = jnp.arange(r.blocks, dtype=jnp.int32)[None] * r.period + r.key[0]
        count = jnp.clip(limit[:, None] - first, 0, r.num_keys)
        count = jnp.broadcast_to(count[:, None], (self.batch, self.heads, r.blocks))
        return self._split(count)

    def _split(self, x: Array) -> Array:
        """Reshapes (B, K, blocks, ...) to (*Z, ...)."""
        if self.together is None:
            return x
        steps = math.prod(x.shape[:3]) // self.together
        return x.reshape(steps, self.together, *x.shape[3:])

    def groups(self, function: Any, arrays: tuple) -> Any:
        """function(*arrays), step by step or on all rectangles at once."""
        if self.together is None:
            return function(*arrays)
        steps = arrays[0].shape[0]
        if steps == 1:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], arrays)))
        return lax.map(lambda step: function(*step), arrays)


def _power_of_two(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << max(0, number.bit_length() - 1)


def _align(x: Array, other: Array) -> Array:
    """x with leading axes of size 1, to the rank of `other`."""
    return x.reshape((1,) * (other.ndim - x.ndim) + x.shape)


def _dot(x: Array, y: Array, subscripts: str) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


class _TileScores:
    """The scores of one tile, and their gradients for queries and keys."""

    def __init__(self, plan: MLRPlan, tiling: _RectangleTiling, number: Any):
        r = tiling.rectangle
        self.rectangle = r
        row = (jnp.arange(tiling.group * tiling.tile, dtype=jnp.int32) % tiling.tile + number * tiling.tile)[
            :, None
        ]
        column = jnp.arange(r.num_keys, dtype=jnp.int32)[None, :]
        self.causal = row >= column if r.diagonal and plan.is_causal else None
        self.column = column
        self.levels = [(start, stop, row // size == column // size) for start, stop, size in r.finer]

    def scores(self, query: Array, key: Array, visible: Array | None) -> Array:
        r = self.rectangle
        scores = _dot(query[..., : r.features], key[..., : r.features], "...td,...sd->...ts")
        for start, stop, same in self.levels:
            level = _dot(query[..., start:stop], key[..., start:stop], "...td,...sd->...ts")
            scores = scores + jnp.where(_align(same, level), level, 0.0)
        if self.causal is not None:
            scores = jnp.where(_align(self.causal, scores), scores, MASKED)
        if visible is not None:
            scores = jnp.where(_align(self.column, scores) < visible[..., None, None], scores, MASKED)
        return scores

    def gradients(self, d_scores: Array, query_t: Array, key: Array) -> tuple[Array, Array]:
        """The gradients of the query (rows, F) and of the key (F, keys)."""
        r, dtype = self.rectangle, key.dtype
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
    plan: MLRPlan, tiling: _RectangleTiling, query: Array, key: Array, value: Array, visible: Array | None
) -> tuple[Array, Array]:
    """The outputs (*Z, tiles, rows, V) and log-sum-exps (*Z, tiles, rows) of all tiles over the rectangle's keys.

    The log-sum-exp of a row that sees no key is MASKED.
    """

    def one_tile(tile: tuple[Array, Array]) -> tuple[Array, Array]:
        number, query = tile
        scores = _TileScores(plan, tiling, number).scores(query, key, visible)
        read = lambda weights: _dot(weights.astype(value.dtype), value, "...ts,...sv->...tv")  # noqa: E731
        out, lse = normalise(block_sums(scores, read))
        return out, jnp.where(lse == -MASKED, MASKED, lse)

    axis = query.ndim - 3
    if tiling.tiles == 1:
        out, lse = one_tile((jnp.int32(0), query.squeeze(axis)))
        return jnp.expand_dims(out, axis), jnp.expand_dims(lse, axis)
    numbers = jnp.arange(tiling.tiles, dtype=jnp.int32)
    out, lse = lax.map(one_tile, (numbers, jnp.moveaxis(query, axis, 0)))
    return jnp.moveaxis(out, 0, axis), jnp.moveaxis(lse, 0, axis)


def _tiles_backward(plan: MLRPlan, tiling: _RectangleTiling, query, key, value, visible, d_out, lse, delta):
    """The float32 gradients of the query (*Z, tiles, rows, F), the key (*Z, F, keys) and the value (*Z, V, keys)."""

    def one_tile(sums, tile):
        number, query, d_out, lse, delta = tile
        pairs = _TileScores(plan, tiling, number)
        d_weights = _dot(d_out, value, "...tv,...sv->...ts")
        weights, d_scores = softmax_gradient(pairs.scores(query, key, visible), lse, d_weights, delta)
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
        (d_key, d_value), d_query = one_tile(
            (d_key, d_value), (jnp.int32(0), *(x.squeeze(axis) for x in tiles))
        )
        return jnp.expand_dims(d_query, axis), d_key, d_value
    numbers = jnp.arange(tiling.tiles, dtype=jnp.int32)
    (d_key, d_value), d_query = lax.scan(
        one_tile, (d_key, d_value), (numbers, *(jnp.moveaxis(x, axis, 0) for x in tiles))
    )
    return jnp.moveaxis(d_query, 0, axis), d_key, d_value
