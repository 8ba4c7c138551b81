"""Arithmetic inside the kernels: products, softmax derivatives, row masks, and finite replacements for infinity."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

#: Replaces -inf in scores. It is finite, so that a row whose scores are all masked does not become NaN.
MASKED = -2.0e38
#: The running maximum of a row without any score so far. Masked scores are so far below it that their weight is 0.
NONE_YET = 0.5 * MASKED
#: The log of the sum of a row that sees nothing: exp2(score - EMPTY) is 0 for every score.
EMPTY = 1.0e30
LOG2E = 1.4426950408889634

#: dot_general dimension numbers: rows by columns, rows by rows, columns by columns.
NN = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


def dot(a: Float[Array, "..."], b: Float[Array, "..."], dims) -> Float[Array, "..."]:
    """Returns a matrix product accumulated in float32. Float32 operands are multiplied in full precision, not as
    bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def column(row: Int[Array, "1 rows"], lanes: int) -> Int[Array, "rows lanes"]:
    """Returns a row of numbers as a column, repeated over lanes."""
    return jnp.broadcast_to(row, (lanes, row.shape[1])).T


# JAX 0.12 moved it to another module.
_reciprocal = pltpu.reciprocal if hasattr(pltpu, "reciprocal") else pl.reciprocal


def reciprocal(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 / x for x >= 1, from the hardware's estimate and two Newton steps, which takes a fifth of the
    instructions of an exact division."""
    estimate = _reciprocal(x, approx=True)
    for _ in range(2):
        estimate = estimate * (2.0 - x * estimate)
    return estimate


def rows_below(x: Float[Array, "rows width"], limit) -> Float[Array, "rows width"]:
    """Returns x with zeros in the rows from `limit` on. Memory past the end of an array may hold NaN, and 0 * NaN is
    NaN."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < limit, x, jnp.zeros_like(x))


def soft_cap(products: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Returns cap tanh(products / cap)."""
    return cap * jnp.tanh(products * (1.0 / cap))


def soft_cap_slope(capped: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Returns the derivative of `soft_cap`, from its result; 0 where that was masked."""
    slope = capped * (1.0 / cap)
    return jnp.maximum(1.0 - slope * slope, 0.0)


def log_sum_exp(
    statistics: Float[Array, "B tiles statistics T"], scale: float
) -> Float[Array, "B tiles packed T"]:
    """Returns the natural log-sum-exp, from the kernels' statistics (the largest score, then the base-2 log of the sum
    relative to it)."""
    top, log_total = jnp.split(statistics, 2, axis=2)
    return jnp.where(log_total == EMPTY, -jnp.inf, top * scale + log_total / LOG2E)


def softmax_changes(
    weights: list[Float[Array, "rows columns"]],
    grads: list[Float[Array, "rows columns"]],
    grad_log_sum: Float[Array, "1 columns"] | None,
    exact: bool,
) -> list[Float[Array, "rows columns"]]:
    """Returns the gradients w (g - sum(w g)) of the scores whose softmax, over all rows of a list of arrays, is
    `weights`.

    If a softmax is almost one-hot, this is a small difference of large numbers. With `exact`, the remainder of the
    rounded sum is computed and subtracted too, so that the sum's rounding does not show.
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
