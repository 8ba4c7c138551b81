"""Consecutive chunks of a recurrence in VMEM: their outputs and the state after them.

The backward kernel differentiates these functions inside the kernel, so every operation must have a derivative that the
TPU compiler accepts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu.core import arithmetic
from pallas_kernels.tpu.core.arithmetic import NN, NT, TN
from pallas_kernels.tpu.recurrent.by_feature import ROWS, Decayed, decayed, pairs

#: Tokens in a chunk: the lanes of a register.
CHUNK = 128


class State(NamedTuple):
    """The state of a head: the sum of the products of keys and values, and the sum of the keys or None."""

    key_value: Float[Array, "F V"]
    key: Float[Array, "rows F"] | None


class Chunk(NamedTuple):
    """The arrays of one chunk and head.

    Attributes:
      query: one array for each query head that shares the key.
      start, end: factors on the state that a token's query reads, and on its key's contribution; None for 1.
      log_decay: log of the factor by which the state shrinks before each token, or before each token by feature; None
        without decay. `start` and `end` do not contain decays by feature, nor does `total`.
      beta: the strengths of the delta rule; None for sums.
      total: the state's factor over the chunk, repeated for each of its columns; None for 1.
      segment: each token's segment, negative for padding; None if all tokens see each other.
    """

    query: tuple[Float[Array, "C F"], ...]
    key: Float[Array, "C F"]
    value: Float[Array, "C V"]
    start: Float[Array, "C 1"] | None
    end: Float[Array, "C 1"] | None
    log_decay: Float[Array, "1 C"] | Float[Array, "C F"] | None
    beta: Float[Array, "C 1"] | None
    total: Float[Array, "1 V"] | None
    segment: Int[Array, "1 C"] | None


class Outputs(NamedTuple):
    """A chunk's outputs for each query: the sums of the values, and of the weights or None."""

    total: list[Float[Array, "C V"]]
    weight: list[Float[Array, "rows C"]] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(a: Float[Array, "..."], b: Float[Array, "..."], dims: Any, dtype: Any) -> Float[Array, "..."]:
    """A product of float32 matrices that are multiplied in `dtype`, forward and backward."""
    return arithmetic.dot(a.astype(dtype), b.astype(dtype), dims)


def _product_fwd(a, b, dims, dtype):
    return product(a, b, dims, dtype), (a, b)


def _product_bwd(dims, dtype, residuals, grad):
    a, b = residuals
    if dims == NN:
        return product(grad, b, NT, dtype), product(a, grad, TN, dtype)
    if dims == NT:
        return product(grad, b, NN, dtype), product(grad, a, TN, dtype)
    return product(b, grad, NT, dtype), product(a, grad, NN, dtype)


product.defvjp(_product_fwd, _product_bwd)


def _between(log_decay: Float[Array, "1 C"]) -> Float[Array, "C C"]:
    """Returns the sums of the logarithms from after the key to the query; 0 if the key comes later.

    Each sum is computed from its own tokens, as in `brl_jax.attention.recurrent.decay`.
    """
    row, column = pairs(CHUNK)
    up_to = jnp.where(column <= row, jnp.broadcast_to(log_decay, (CHUNK, CHUNK)), 0.0)
    return product(up_to, jnp.where(row > column, 1.0, 0.0), NN, jnp.float32)


def _seen(chunk: Chunk) -> Bool[Array, "C C"]:
    """Returns whether the query of each row sees the key of each column."""
    row, column = pairs(CHUNK)
    if chunk.segment is None:
        return column <= row
    keys = jnp.broadcast_to(chunk.segment, (CHUNK, CHUNK))
    return (column <= row) & (keys == keys.T) & (keys >= 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def inverses(lowers: list[Float[Array, "C C"]], dtype: Any) -> list[Float[Array, "C C"]]:
    """Returns (I + lower)^-1 for strictly lower matrices, from the inverses of blocks of doubling size.

    In bfloat16 a step of Newton's method follows, X + X (I - (I + lower) X), whose residual uses both halves of its
    operands. It squares the error of a bfloat16 inverse, with a quarter of the passes of float32 products.
    """
    row, column = pairs(CHUNK)
    one = jnp.where(row == column, 1.0, 0.0)
    found = [one] * len(lowers)

    def times(a: list[Array], b: list[Array]) -> list[Array]:
        return [arithmetic.dot(x.astype(dtype), y.astype(dtype), NN) for x, y in zip(a, b)]

    for bits in range(CHUNK.bit_length() - 1):
        apart = (row >> bits) != (column >> bits)
        joins = apart & ((row >> bits + 1) == (column >> bits + 1))
        corners = [jnp.where(joins, lower, 0.0) for lower in lowers]
        if bits:
            corners = times(found, times(corners, found))
        found = [x - corner for corner, x in zip(corners, found)]
    if dtype == jnp.bfloat16:
        high, low = map(list, zip(*map(_halves, lowers)))
        first, second = map(list, zip(*map(_halves, found)))
        products = zip(times(high, first), times(high, second), times(low, first))
        rest = [one - x - sum(parts) for x, parts in zip(found, products)]
        found = [x + y for x, y in zip(found, times(found, rest))]
    return found


def _halves(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns x in bfloat16, and the remainder."""
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return high, x - high


def _inverses_fwd(lowers, dtype):
    found = inverses(lowers, dtype)
    return found, found


def _inverses_bwd(dtype, found, grads):
    grads = [product(x, grad, TN, dtype) for x, grad in zip(found, grads)]
    return ([-product(grad, x, NT, dtype) for x, grad in zip(found, grads)],)


inverses.defvjp(_inverses_fwd, _inverses_bwd)


def walk(
    heads: list[list[Chunk]], states: list[State], dtype: Any
) -> tuple[list[list[Outputs]], list[State]]:
    """Returns the outputs of each head's consecutive chunks, and the states after them.

    All arrays are float32; products are multiplied in `dtype`. Each quantity is computed for all chunks before the next
    quantity: the compiler stays close to program order, and products that wait for each other leave the matrix units
    idle. Only the state passes from chunk to chunk.
    """
    times = functools.partial(product, dtype=dtype)
    count = len(heads[0])
    chunks = [chunk for head in heads for chunk in head]
    row, column = pairs(CHUNK)
    ones = jnp.ones((ROWS, CHUNK), jnp.float32)
    seen = [_seen(chunk) for chunk in chunks]
    delta = chunks[0].beta is not None
    group = len(chunks[0].query)
    products = _products(chunks, delta, dtype)

    def weigh(place: int, seen: list[Array]) -> list[Array]:
        return [jnp.where(visible, x.products[place], 0.0) for visible, x in zip(seen, products)]

    weights = [weigh(g, seen) for g in range(group)]
    keys = [_scaled(x.key, chunk.end) for chunk, x in zip(chunks, products)]
    values = [chunk.value for chunk in chunks]
    if delta:
        overlaps = weigh(group, [visible & (column < row) for visible in seen])
        found = inverses([_scaled(x, chunk.beta) for chunk, x in zip(chunks, overlaps)], dtype)
        reads = [_scaled(_scaled(x.reads[group], c.start), c.beta) for c, x in zip(chunks, products)]
        values = [times(x, _scaled(c.value, c.beta), NN) for c, x in zip(chunks, found)]
        reads = [times(x, key, NN) for key, x in zip(reads, found)]
        added = None
    else:
        added = [times(key, value, TN) for key, value in zip(keys, values)]
    sums = None if states[0].key is None else [times(ones, key, NN) for key in keys]
    before, last = [], list(states)
    for number in range(count):  # interleave the heads, because a chunk waits for the one before it
        for head in range(len(heads)):
            at, state = head * count + number, last[head]
            before.append((at, state))
            if added is None:
                values[at] = values[at] - times(reads[at], state.key_value, NN)
            new = times(keys[at], values[at], TN) if added is None else added[at]
            total = chunks[at].total
            summed = None
            if sums is not None and state.key is not None:
                factor = None if total is None else total[:, :1]
                summed = _scaled(state.key, factor) + sums[at]
            kept = _scaled(_scaled(state.key_value, total), products[at].total)
            last[head] = State(kept + new, summed)
    read = [state for _, state in sorted(before, key=lambda item: item[0])]
    outputs = [Outputs([], None if sums is None else []) for _ in chunks]
    for g in range(group):
        rows = [_scaled(x.reads[g], chunk.start) for chunk, x in zip(chunks, products)]
        outside = [times(x, state.key_value, NN) for x, state in zip(rows, read)]
        inside = [times(x, value, NN) for value, x in zip(values, weights[g])]
        for at, output in enumerate(outputs):
            output.total.append(outside[at] + inside[at])
            if output.weight is not None:
                counted = times(read[at].key, rows[at], NT) + times(ones, weights[g][at], NT)
                output.weight.append(counted)
    return [outputs[head * count : (head + 1) * count] for head in range(len(heads))], last


def _products(chunks: list[Chunk], delta: bool, dtype: Any) -> list[Decayed]:
    """Returns the products of each chunk's queries, and for the delta rule of its key, with the key."""
    log = chunks[0].log_decay
    if log is not None and log.shape[0] == CHUNK:
        return [decayed(c.query, c.key, c.log_decay, delta, dtype) for c in chunks]
    rows = [[*chunk.query, chunk.key] if delta else list(chunk.query) for chunk in chunks]
    decays = [None if c.log_decay is None else jnp.exp(_between(c.log_decay)) for c in chunks]
    found = []
    for place in range(len(rows[0])):
        scores = [product(x[place], chunk.key, NT, dtype) for chunk, x in zip(chunks, rows)]
        found.append([_scaled(x, decay) for x, decay in zip(scores, decays)])
    return [Decayed(list(x), given, c.key, None) for x, given, c in zip(zip(*found), rows, chunks)]


def _scaled(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor
