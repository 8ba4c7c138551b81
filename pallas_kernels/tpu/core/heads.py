"""How heads lie in the 128 lanes of a TPU register, and the small pieces of arithmetic that the kernels
share.

Arrays arrive as (batch, length, heads, head_dim). A kernel sees them as (batch, length, tiles * width): one
tile holds one head of 128 or 256 lanes, or as many narrower heads as fill 128 lanes, so that no lane is
wasted and the reshape moves nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

LANES = 128
MAX_HEAD_DIM = 256
#: Stands for -inf in scores: finite, so that a row whose scores are all masked gives no NaN.
MASKED = -2.0e38
#: The largest score so far of a row that has seen none: masked scores lie so far below it that they weigh 0.
NONE_YET = 0.5 * MASKED
#: The log of the sum in a row that sees nothing: exp2(score - EMPTY) is 0 whatever the score.
EMPTY = 1.0e30
LOG2E = 1.4426950408889634

#: dot_general dimension numbers: rows by columns, rows by rows, columns by columns.
NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


class Layout(NamedTuple):
    """One tile holds `packed` heads of `head_dim` lanes; `group` query tiles read the same key tile."""

    head_dim: int
    packed: int
    group: int

    @property
    def width(self) -> int:
        return self.head_dim * self.packed


def dot(a: Float[Array, ...], b: Float[Array, ...], dims) -> Float[Array, ...]:
    """Matrix product with float32 accumulation; float32 operands get full float32 products, not bfloat16
    ones."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def turned_product(
    x: Float[Array, "rows width"], weights: Float[Array, "rows columns"], head: int, layout: Layout
) -> Float[Array, "head_dim columns"]:
    """x^T weights for the lanes of one packed head.

    Where heads share lanes, x is turned first, so that the product runs over one head's rows and not over
    all.
    """
    if layout.packed == 1:
        return dot(x, weights, TN)
    return dot(x.T[head * layout.head_dim : (head + 1) * layout.head_dim], weights, NN)


def column(row: Int[Array, "1 rows"], lanes: int) -> Int[Array, "rows lanes"]:
    """A row of numbers as a column, repeated over lanes."""
    return jnp.broadcast_to(row, (lanes, row.shape[1])).T


# JAX 0.12 has moved it.
_reciprocal = pltpu.reciprocal if hasattr(pltpu, "reciprocal") else pl.reciprocal


def reciprocal(x: Float[Array, ...]) -> Float[Array, ...]:
    """1 / x for x >= 1 by the hardware's estimate and two Newton steps: a fifth of the exact division's
    instructions."""
    estimate = _reciprocal(x, approx=True)
    for _ in range(2):
        estimate = estimate * (2.0 - x * estimate)
    return estimate


def lanes_of_head(x: Float[Array, "rows width"], head: int, layout: Layout) -> Float[Array, "rows width"]:
    """x with the lanes of every packed head but one set to zero."""
    if layout.packed == 1:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = head * layout.head_dim
    return jnp.where((lane >= first) & (lane < first + layout.head_dim), x, jnp.zeros_like(x))


def rows_below(x: Float[Array, "rows width"], limit) -> Float[Array, "rows width"]:
    """x with the rows from `limit` on set to zero: what lies past an array's end may be NaN, and 0 * NaN is
    NaN."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < limit, x, jnp.zeros_like(x))


def alike(*arrays):
    """The arrays, made to vary over the same mesh axes: inside `shard_map` a kernel's operands must."""
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def widen(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(widen(x) for x in arrays)


def result(shape: tuple[int, ...], dtype, like: Array) -> jax.ShapeDtypeStruct:
    """What a kernel gives back; it varies over the mesh axes that its operands, here `like`, vary over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def layout_of(heads: int, key_heads: int, head_dim: int) -> Layout:
    """How so many heads of queries and keys lie in lanes; see `pack`."""
    head_dim = next(size for size in (32, 64, 128, 256) if size >= head_dim)
    packed, groups = max(1, LANES // head_dim), heads // key_heads
    if packed > 1:
        groups = groups // packed if groups % packed == 0 else 1
    return Layout(head_dim, packed, groups)


def pack(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], value: Float[Array, "B S K H"]
) -> tuple[Float[Array, "B T L"], Float[Array, "B S M"], Float[Array, "B S M"], Layout]:
    """Lays heads side by side in lanes, padding odd head dims with zeros and odd head counts with empty
    heads.

    Narrow grouped heads: when the group is a multiple of the heads in a tile, each key head is repeated
    across its tile (the keys grow by at most 128 / head_dim, and are smaller than the queries by more);
    otherwise keys are repeated to as many heads as the queries have. JAX differentiates this function itself.
    """
    heads, head_dim = query.shape[2:]
    layout = layout_of(heads, key.shape[2], head_dim)
    repeats = heads // key.shape[2] // layout.group
    if repeats > 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    extra = -heads % layout.packed
    pad_lanes = layout.head_dim - head_dim

    def lay(x):
        if extra or pad_lanes:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, pad_lanes)))
        return x.reshape(*x.shape[:2], -1)

    return lay(query), lay(key), lay(value), layout


def unpack(x: Float[Array, "B T L"], layout: Layout, heads: int, head_dim: int) -> Float[Array, "B T N H"]:
    """Undoes `pack` for an array laid out like the queries."""
    x = x.reshape(*x.shape[:2], -1, layout.head_dim)
    return x[:, :, :heads, :head_dim]


def log_sum_exp(
    statistics: Float[Array, "B tiles 2*packed T"], scale: float
) -> Float[Array, "B tiles packed T"]:
    """Natural log-sum-exp from the kernels' statistics (largest score, base-2 log of the sum over it)."""
    top, log_total = jnp.split(statistics, 2, axis=2)
    return jnp.where(log_total == EMPTY, -jnp.inf, top * scale + log_total / LOG2E)


def unpack_rows(rows: Float[Array, "B tiles packed T"], heads: int) -> Float[Array, "B T N"]:
    """One number a head and query as (batch, length, heads)."""
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :heads].swapaxes(1, 2)


def softmax_changes(
    weights: list[Float[Array, "rows columns"]],
    grads: list[Float[Array, "rows columns"]],
    grad_log_sum: Float[Array, "1 columns"] | None,
    exact: bool,
) -> list[Float[Array, "rows columns"]]:
    """Gradients of scores whose softmax over all rows of a list of arrays is `weights`: w (g - sum(w g)).

    Where a softmax is all but one-hot, that is a small difference of large numbers. `exact` measures what the sum left
    over and subtracts that too, so that the sum's rounding does not show.
    """

    def total(products):
        return functools.reduce(jnp.add, products).sum(axis=0, keepdims=True)

    products = [w * g for w, g in zip(weights, grads)]
    mean = total(products)
    if not exact:
        mean = mean if grad_log_sum is None else mean - grad_log_sum
        return [x - w * mean for w, x in zip(weights, products)]
    centred = [g - mean for g in grads]
    rest = total([w * g for w, g in zip(weights, centred)])
    rest = rest if grad_log_sum is None else rest - grad_log_sum
    return [w * (g - rest) for w, g in zip(weights, centred)]


def pipelined(units: int, *stages) -> None:
    """Runs stage t of unit u beside stage t + 1 of unit u - 1: independent work for the scheduler to
    interleave.

    The compiler keeps close to program order, so that a unit run from start to end alone leaves the matrix
    units idle during its softmax.
    """
    held: list[dict[int, tuple]] = [{} for _ in stages]
    for step in range(units + len(stages) - 1):
        for number in (0, *range(len(stages) - 1, 0, -1)):
            unit = step - number
            if 0 <= unit < units:
                out = stages[number](unit, *(held[number].pop(unit) if number else ()))
                if number + 1 < len(stages):
                    held[number + 1][unit] = out
