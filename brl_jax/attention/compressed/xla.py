"""Compression of a long history, one piece at a time, forward and backward. Only one piece's logits exist at once.

Loops stop at the last key that exists, so that a half-empty cache costs half. The backward pass recomputes the logits,
uses the saved log-sum-exp, and visits each piece once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.on_mesh import rows_and_heads
from brl_jax.attention.core.scores import Score, accumulation_dtype, elementwise_weights, weights_dtype
from brl_jax.attention.core.softmax import (
    MASKED,
    SoftmaxSums,
    block_sums,
    empty_sums,
    merge_over_devices,
    merge_sums,
    normalise,
    softmax_gradient,
)
from brl_jax.attention.core.varying import vary_like


class Operands(NamedTuple):
    """The arrays of a call of `compress`. Bias and mask have 4 axes, each of full size or 1."""

    query: Float[Array, "B M N H"]
    keys: tuple[Float[Array, "B S N H"], ...]
    value: Float[Array, "B S N V"]
    bias: Float[Array, "#B #N #M #S"] | None
    mask: Bool[Array, "#B #N #M #S"] | None
    lengths: Int[Array, "B"] | None


class _Piece(NamedTuple):
    """One piece of the keys, with heads before keys, the order in which a CPU multiplies matrices faster."""

    keys: list[Float[Array, "B N P H"]]
    value: Float[Array, "B N P H"]
    bias: Float[Array, "#B #N #M #P"] | None
    mask: Bool[Array, "#B #N #M P"]


def kept_shapes(query: Any, value: Any, two: bool, score: Score) -> Any:
    """The shapes that `forward` returns for queries (..., M, N, H) and one attention or two."""
    *leading, count, heads, _ = query.shape
    dtype = accumulation_dtype(query.dtype)
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[3]), dtype)
    log_sum = jax.ShapeDtypeStruct((*leading, heads, count), dtype) if score == "softmax" else None
    return (out,) * (1 + two), (log_sum,) * (1 + two)


def piece_size(num_queries: int, num_keys: int) -> int:
    """Keys in a piece: as large as keeps a head's logits in a core's cache."""
    return min(num_keys, max(256, min(4096, 2**18 // num_queries // 128 * 128)))


def plain_read(
    operands: Operands, *, piece: int, scale: float, score: Score, axis_name: str | None = None
) -> tuple[Float[Array, "B M N V"], ...]:
    """sigma(c Q K^T + b) V for each set of keys, in the dtype of sums. Visits all pieces, in operations that JAX
    differentiates any number of times.

    axis_name: inside `shard_map`, the mesh axis that shards the keys.
    """
    operands = vary_like(operands, operands)

    def steps(step: Any, start: Any) -> Any:
        numbers = jnp.arange(-(-operands.value.shape[1] // piece), dtype=jnp.int32)
        return lax.scan(lambda carry, i: (jax.checkpoint(step)(i, carry), None), start, numbers)[0]

    return forward(operands, piece, scale, score, axis_name, steps)[0]


def _steps(x: Operands, piece: int) -> Any:
    """The number of pieces that contain keys; an int if no lengths are given."""
    if x.lengths is None:
        return -(-x.value.shape[1] // piece)
    longest = jnp.minimum(x.lengths.max(), x.value.shape[1]).astype(jnp.int32)
    return (longest + jnp.int32(piece - 1)) // jnp.int32(piece)


def _until_last_key(x: Operands, piece: int, step: Any, start: Any) -> Any:
    if piece == x.value.shape[1]:
        return step(jnp.int32(0), start)  # a GPU would wait for the loop's condition
    return lax.fori_loop(jnp.int32(0), jnp.int32(_steps(x, piece)), step, start)


def _start(size: int, step: Array, piece: int) -> Array:
    """The start of a piece. The last one starts early, to end at the last key; a mask hides what it repeats."""
    return jnp.minimum(step * piece, size - piece).astype(jnp.int32)


def _cut(x: Operands, step: Array, piece: int) -> _Piece:
    start = _start(x.value.shape[1], step, piece)
    cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=piece)
    index = start + jnp.arange(piece, dtype=jnp.int32)
    mask = (index >= step * piece)[None, None, None]
    if x.lengths is not None:
        mask = mask & (index[None] < x.lengths[:, None].astype(jnp.int32))[:, None, None]
    if x.mask is not None:
        mask = mask & (cut(x.mask, axis=3) if x.mask.shape[3] > 1 else x.mask)
    # A key that no query sees may be NaN, and must reach neither the sum nor the gradient.
    seen = jnp.any(mask, axis=(1, 2))[:, :, None, None]

    def rows(array):
        return jnp.swapaxes(jnp.where(seen, cut(array, axis=1), jnp.zeros((), array.dtype)), 1, 2)

    bias = cut(x.bias, axis=3) if x.bias is not None and x.bias.shape[3] > 1 else x.bias
    return _Piece([rows(key) for key in x.keys], rows(x.value), bias, mask)


def _logits(query: Array, key: Array, bias: Array | None, scale: float) -> Float[Array, "B N M P"]:
    accumulate = accumulation_dtype(query.dtype)
    logits = jnp.einsum("bnmh,bnph->bnmp", query, key, preferred_element_type=accumulate)
    logits = logits * jnp.asarray(scale, accumulate)
    return logits if bias is None else logits + bias.astype(accumulate)


def _add(sums: SoftmaxSums, logits: Array, mask: Array, value: Array, score: Score) -> SoftmaxSums:
    """Adds one piece to the sums. A score that is not normalised uses only `weighted`."""

    def read(weights: Array) -> Array:
        kept = weights_dtype(value.dtype, score)
        return jnp.einsum(
            "bnmp,bnph->bnmh",
            weights.astype(kept),
            value.astype(kept),
            preferred_element_type=accumulation_dtype(value.dtype),
        )

    if score != "softmax":
        return sums._replace(weighted=sums.weighted + read(elementwise_weights(logits, mask, score)))
    return merge_sums(sums, block_sums(jnp.where(mask, logits, MASKED), read))


def forward(
    x: Operands, piece: int, scale: float, score: Score, axis_name: str | None = None, loop: Any = None
) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
    """The results, and each row's log-sum-exp as `normalise` returns it (None unless the score is softmax).

    loop: (step, start) -> the last carry; by default a loop that stops at the last key that exists.
    """
    batch, count, heads, _ = x.query.shape
    accumulate = accumulation_dtype(x.query.dtype)
    query = jnp.swapaxes(x.query, 1, 2)

    def step(i, every):
        part = _cut(x, i, piece)
        return tuple(
            _add(sums, _logits(query, key, part.bias, scale), part.mask, part.value, score)
            for sums, key in zip(every, part.keys)
        )

    start = empty_sums((batch, heads, count), x.value.shape[3], accumulate)
    if loop is None:
        loop = functools.partial(_until_last_key, x, piece)
    every = loop(step, vary_like((start,) * len(x.keys), x))
    if score != "softmax":
        totals = (sums.weighted for sums in every)
        if axis_name is not None:
            totals = (lax.psum(total, axis_name) for total in totals)
        return tuple(jnp.swapaxes(total, 1, 2) for total in totals), (None,) * len(every)
    if axis_name is not None:
        every = tuple(merge_over_devices(sums, axis_name) for sums in every)
    outs, log_sums = zip(*(normalise(sums) for sums in every))
    return tuple(jnp.swapaxes(out, 1, 2) for out in outs), log_sums


@divided(rows_and_heads)
def read_cache(
    query: Float[Array, "B N M H"],
    key: Float[Array, "B N S H"],
    value: Float[Array, "B N S V"],
    length: Int[Array, ""],
    *,
    scale: float,
) -> Float[Array, "B N M V"]:
    """softmax(c Q K^T) V over the first `length` keys of a decoding cache, in query's dtype; zeros without keys.

    The cache has heads before tokens, so this loop slices it without copying it.
    """
    size, accumulate = key.shape[2], accumulation_dtype(query.dtype)
    piece = piece_size(query.shape[2], size)

    def step(i, sums):
        start = _start(size, i, piece)
        index = start + jnp.arange(piece, dtype=jnp.int32)
        seen = (index >= i * piece) & (index < length)
        # The unused end of the cache may be NaN.
        key_rows, value_rows = (
            jnp.where(seen[:, None], lax.dynamic_slice_in_dim(a, start, piece, 2), jnp.zeros((), a.dtype))
            for a in (key, value)
        )
        return _add(sums, _logits(query, key_rows, None, scale), seen, value_rows, "softmax")

    start = vary_like(empty_sums(query.shape[:3], value.shape[3], accumulate), (query, key, value, length))
    length = jnp.asarray(length, jnp.int32)
    sums = lax.fori_loop(jnp.int32(0), (length + jnp.int32(piece - 1)) // jnp.int32(piece), step, start)
    return normalise(sums)[0].astype(query.dtype)


def backward(
    x: Operands,
    outs: tuple[Array, ...],
    log_sums: tuple[Array | None, ...],
    grads: tuple[Array, ...],
    piece: int,
    scale: float,
    score: Score,
) -> Operands:
    """The gradients of the operands, from what `forward` returned and the gradients of its results.

    Since the results are over all keys, the gradients of one device's keys do not depend on other devices' keys.
    """
    accumulate = accumulation_dtype(x.query.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=accumulate)
    query = jnp.swapaxes(x.query, 1, 2)
    grads = tuple(jnp.swapaxes(g, 1, 2) for g in grads)
    # The softmax's derivative needs each row's weighted mean of the changes: the output times its gradient.
    means = [(g * jnp.swapaxes(out, 1, 2)).sum(-1) for g, out in zip(grads, outs)]
    narrow = [g.astype(weights_dtype(x.value.dtype, score)) for g in grads]

    def logits_gradient(logits, mask, change, log_sum, mean):
        """The weights, and the gradient of the logits."""
        if score == "softmax":
            return softmax_gradient(jnp.where(mask, logits, MASKED), log_sum, change, mean)
        weights, pull = jax.vjp(lambda z: elementwise_weights(z, mask, score), logits)
        return weights, pull(change)[0]

    def step(i, totals):
        d_query, d_keys, d_value, d_bias = totals
        part, start = _cut(x, i, piece), _start(x.value.shape[1], i, piece)

        def add(total, rows, axis):
            old = lax.dynamic_slice_in_dim(total, start, piece, axis)
            return lax.dynamic_update_slice_in_dim(total, old + rows.astype(total.dtype), start, axis)

        d_keys = list(d_keys)
        value_rows: Any = 0.0
        bias_rows: Any = 0.0
        for n, key in enumerate(part.keys):
            logits = _logits(query, key, part.bias, scale)
            change = product("bnmh,bnph->bnmp", narrow[n], part.value.astype(narrow[n].dtype))
            weights, d_logits = logits_gradient(logits, part.mask, change, log_sums[n], means[n])
            value_rows += product("bnmp,bnmh->bnph", weights.astype(narrow[n].dtype), narrow[n])
            bias_rows += d_logits
            scaled = (d_logits * jnp.asarray(scale, accumulate)).astype(x.query.dtype)
            d_query += product("bnmp,bnph->bnmh", scaled, key)
            key_rows = product("bnmp,bnmh->bnph", scaled, query)
            d_keys[n] = add(d_keys[n], jnp.swapaxes(key_rows, 1, 2), 1)
        if x.bias is not None:
            small = [axis for axis, size in enumerate(x.bias.shape) if size == 1]
            bias_rows = bias_rows.sum(axis=small, keepdims=True)
            d_bias = add(d_bias, bias_rows, 3) if x.bias.shape[3] > 1 else d_bias + bias_rows
        return d_query, tuple(d_keys), add(d_value, jnp.swapaxes(value_rows, 1, 2), 1), d_bias

    zeros = (
        jnp.zeros(query.shape, accumulate),
        tuple(jnp.zeros_like(key) for key in x.keys),
        jnp.zeros_like(x.value),
        None if x.bias is None else jnp.zeros(x.bias.shape, accumulate),
    )
    d_query, d_keys, d_value, d_bias = _until_last_key(x, piece, step, vary_like(zeros, (x, grads)))
    d_bias = None if x.bias is None else d_bias.astype(x.bias.dtype)
    return Operands(jnp.swapaxes(d_query, 1, 2).astype(x.query.dtype), d_keys, d_value, d_bias, None, None)
