"""Decay by feature within a chunk (GLA, arXiv:2312.06635; KDA, arXiv:2510.26692): products, factors, and their
gradients.

The chunk is halved level by level, down to single tokens. At each level the pairs of tokens meet that lie in the two
halves of a block. The later token decays from the middle of the block, and the earlier one until the middle, so one
product has the scores of all these pairs. Every exponent is the sum of the logarithms between two tokens, hence at most
0. Each sum is added up from its own tokens, because differences of running sums would lose a weak decay behind a strong
one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu.core import arithmetic
from pallas_kernels.tpu.core.arithmetic import NN, NT, TN

#: Rows of an array with identical rows: the sublanes of a register.
ROWS = 8


class Decayed(NamedTuple):
    """What `decayed` returns.

    Attributes:
      products: each row times the key, each feature weighted by its decay between the two tokens; for pairs with the
        key's token before the row's, and where the row is a query, for the same token. The rest is 0.
      reads: the rows, decayed from the chunk's beginning.
      key: the key, decayed until the chunk's end.
      total: the decay over the chunk.
    """

    products: list[Float[Array, "C C"]]
    reads: list[Float[Array, "C F"]]
    key: Float[Array, "C F"]
    total: Float[Array, "F 1"] | None


class _Factors(NamedTuple):
    """Decays in a chunk: at each level until or from the middle of the block, and from the beginning or to the end."""

    levels: list[Float[Array, "C F"]]
    start: Float[Array, "C F"]
    end: Float[Array, "C F"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def decayed(
    queries: tuple[Float[Array, "C F"], ...],
    key: Float[Array, "C F"],
    log: Float[Array, "C F"],
    reads_key: bool,
    dtype: Any,
) -> Decayed:
    """Returns the products and factors of a chunk, for the queries and with `reads_key` the key as the last row.

    Args:
      log: the logarithms of each token's decay, at most 0 and finite.
      dtype: in which matrices are multiplied.
    """
    return _decayed_fwd(queries, key, log, reads_key, dtype)[0]


def _decayed_fwd(queries, key, log, reads_key, dtype):
    factors = _factors(log)
    rows = (*queries, key) if reads_key else queries
    row, column = pairs(key.shape[0])
    products = [jnp.where(row == column, _times(x, key, NT, dtype), 0.0) for x in queries]
    products += [jnp.zeros_like(row, jnp.float32)] * (len(rows) - len(queries))
    for level, factor in enumerate(factors.levels):
        there, met = _earlier(key * factor, level), _meet(level, column)
        for i, x in enumerate(rows):
            near, before = _later(x, level) * _later(factor, level), _later(products[i], level)
            found = jnp.where(met, _times(near, there, NT, dtype), before)
            products[i] = _with_later(products[i], found, level)
    total = _column(factors.start[-1:])
    made = Decayed(products, [x * factors.start for x in rows], key * factors.end, total)
    return made, (queries, key, factors, total)


def _decayed_bwd(reads_key, dtype, residuals, grads):
    queries, key, factors, total = residuals
    rows = (*queries, key) if reads_key else queries
    row, column = pairs(key.shape[0])
    of_rows = [jnp.zeros_like(key)] * len(rows)
    of_key = jnp.zeros_like(key)
    for level, factor in enumerate(factors.levels):
        there, met, later = _earlier(key * factor, level), _meet(level, column), _later(factor, level)
        back = jnp.zeros_like(key)
        for i, x in enumerate(rows):
            grad = jnp.where(met, _later(grads.products[i], level), 0.0)
            found = _later(of_rows[i], level) + later * _times(grad, there, NN, dtype)
            of_rows[i] = _with_later(of_rows[i], found, level)
            back += _times(grad, _later(x, level) * later, TN, dtype)
        of_key += _earlier(factor * back, level)
    # A token's decay is between all rows from it on and all earlier keys. Pairs of two later tokens cancel in the sum
    # of what flows from rows to keys over the tokens from it on.
    of_rows = [x + factors.start * grad for x, grad in zip(of_rows, grads.reads)]
    flow = sum(x * grad for x, grad in zip(rows, of_rows)) - key * of_key
    written = factors.end * grads.key
    ends = key * written
    of_log = _times(jnp.where(row <= column, 1.0, 0.0), flow - ends, NN, jnp.float32)
    of_log += jnp.sum(ends, axis=0, keepdims=True) + _row(total * grads.total)
    of_key += written
    of_queries = []
    for x, found, grad in zip(queries, of_rows, grads.products):
        own = jnp.where(row == column, grad, 0.0)
        of_queries.append(found + _times(own, key, NN, dtype))
        of_key += _times(own, x, TN, dtype)
    if reads_key:
        of_key += of_rows[-1]
    return tuple(of_queries), of_key, of_log


decayed.defvjp(_decayed_fwd, _decayed_bwd)


def _times(a: Array, b: Array, dims: Any, dtype: Any) -> Array:
    return arithmetic.dot(a.astype(dtype), b.astype(dtype), dims)


def pairs(size: int) -> tuple[Int[Array, "C C"], Int[Array, "C C"]]:
    """Returns each pair's query number, which is the row, and key number."""
    shape = (size, size)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


# The later tokens of a level are in the second halves of its blocks. Where halves are whole registers, only they are
# computed.


def _later(x: Float[Array, "C X"], level: int) -> Float[Array, "later X"]:
    """Returns the rows that may be of later tokens."""
    half = 1 << level
    return x if half < ROWS else jnp.concatenate([x[i : i + half] for i in range(half, len(x), 2 * half)])


def _with_later(x: Float[Array, "C X"], later: Float[Array, "later X"], level: int) -> Float[Array, "C X"]:
    """Returns x with `later` as its rows `_later(x, level)`."""
    half = 1 << level
    if half < ROWS:
        return later
    blocks = [(x[2 * i : 2 * i + half], later[i : i + half]) for i in range(0, len(later), half)]
    return jnp.concatenate([rows for block in blocks for rows in block])


def _earlier(x: Float[Array, "C X"], level: int) -> Float[Array, "C X"]:
    """Returns x, with zeros for the later tokens where they are whole registers."""
    return _with_later(x, jnp.zeros_like(_later(x, level)), level) if 1 << level >= ROWS else x


def _meet(level: int, column: Array) -> Bool[Array, "later C"]:
    """Whether each row of `_later` and the key's token are in the two halves of a block."""
    row = jax.lax.broadcasted_iota(jnp.int32, column.shape, 0)
    if 1 << level < ROWS:
        return (((row >> level) ^ (column >> level)) == 1) & (row > column)
    return _later((row >> level) - 1, level) == (_later(column, level) >> level)


def _factors(log: Float[Array, "C F"]) -> _Factors:
    """Returns all decays. A register has 8 tokens, in which sums need rotations; larger blocks are whole registers."""
    size, features = log.shape
    x = log.reshape(size // ROWS, ROWS, features)
    token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)

    # Sums from the beginning of the block through the token, and from after the token to the end of the block.
    start, end = x, jnp.zeros_like(x)
    levels = []
    for level in range(ROWS.bit_length() - 1):
        half = 1 << level
        second = ((token >> level) & 1) == 1
        levels.append(jnp.where(second, start, end).reshape(size, features))
        # The sum of the other half of the block, for each token.
        other = _other_half(start, token, half)
        start, end = start + jnp.where(second, other, 0.0), end + jnp.where(second, 0.0, other)
    starts, ends = list(start), list(end)
    half = 1  # in registers
    while half < len(starts):
        seconds = [(i // half) % 2 == 1 for i in range(len(starts))]
        levels.append(jnp.concatenate([a if later else b for a, b, later in zip(starts, ends, seconds)]))
        joined_starts, joined_ends = [], []
        for i, later in enumerate(seconds):
            block = i // half
            other = starts[(block if later else block + 2) * half - 1][-1:]
            joined_starts.append(starts[i] + other if later else starts[i])
            joined_ends.append(ends[i] if later else ends[i] + other)
        starts, ends = joined_starts, joined_ends
        half *= 2
    start, end = jnp.exp(jnp.concatenate(starts)), jnp.exp(jnp.concatenate(ends))
    return _Factors([jnp.exp(x) for x in levels], start, end)


def _other_half(start: Float[Array, "n 8 F"], token: Array, half: int) -> Float[Array, "n 8 F"]:
    """Returns for each token the sum over the other half of its block of 2 * half tokens."""
    found = jnp.zeros_like(start)
    for first in range(0, ROWS, 2 * half):
        middle, last = (start[:, i - 1 : i] for i in (first + half, first + 2 * half))
        found = jnp.where(token >= first, jnp.where((token & half) == half, middle, last), found)
    return found


def _column(row: Float[Array, "1 F"]) -> Float[Array, "F 1"]:
    return jnp.broadcast_to(row, (ROWS, row.shape[1])).T[:, :1]


def _row(column: Float[Array, "F 1"]) -> Float[Array, "1 F"]:
    return jnp.broadcast_to(column, (column.shape[0], ROWS)).T[:1]
