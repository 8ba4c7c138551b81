"""Functions in Triton's language that several kernels share; the compiler inlines them."""

# ruff: noqa: E741
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offsets(batch, rows, head, features, LENGTH: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr):
    """Returns the offsets of one head's rows in an array (B, LENGTH, HEADS, H)."""
    return ((batch * LENGTH + rows[:, None]) * HEADS + head) * H + features[None, :]


@triton.jit
def inside(rows, stop, features, H: tl.constexpr):
    """Returns which elements of a tile exist: rows before `stop`, and the first H features."""
    return (rows[:, None] < stop) & (features[None, :] < H)


@triton.jit
def base2_scores(products, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Returns scaled and (CAP > 0) softly capped scores times log2(e), and the slope of the cap."""
    if CAP > 0:
        # tanh, exact to the rounding of 1; Triton's tanh comes from a GPU library and cannot be interpreted.
        bend = 1.0 - 2.0 / (tl.exp2(products * (2.8853900817779268 * SCALE / CAP)) + 1.0)
        return bend * (CAP * 1.4426950408889634), 1.0 - bend * bend
    else:
        return products * (SCALE * 1.4426950408889634), 1.0


@triton.jit
def softmax_step(scores, m, l, acc):
    """Returns the weights of another block of keys, and the rows' maxima, sums and results so far, relative to the new
    maxima.

    Scores are times log2(e). The caller still has to add the block's values to the results.
    """
    top = tl.maximum(m, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(m - top)
    return weights, top, l * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def relu(scores):
    """max(scores, 0). NaN stays."""
    return tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def elementwise_weights(scores, SCORE: tl.constexpr):
    """Squared ReLU (1) or laplace (2), the normal distribution function of mean sqrt(1/2) and variance 1 / (4 pi)."""
    if SCORE == 1:
        return relu(scores) * relu(scores)
    else:
        return 0.5 + 0.5 * tl.erf((scores - 0.7071067811865476) * 2.5066282746310002)


@triton.jit
def elementwise_slopes(scores, SCORE: tl.constexpr):
    """Returns the derivatives of `elementwise_weights`."""
    if SCORE == 1:
        return 2.0 * relu(scores)
    else:
        # d/ds of 0.5 erf(u) is exp(-u^2) / sqrt(pi) times sqrt(2 pi).
        u = (scores - 0.7071067811865476) * 2.5066282746310002
        return 1.4142135623730951 * tl.exp(-u * u)


@triton.jit
def seen_pairs(masks, number, queries, keys, BM: tl.constexpr, BN: tl.constexpr, CONSECUTIVE: tl.constexpr):
    """Which pairs of two blocks see each other; queries and keys count from 0 in their blocks, and broadcast."""
    if CONSECUTIVE:
        first = tl.load(masks + number * (2 * BM) + queries)
        stop = tl.load(masks + number * (2 * BM) + BM + queries)
        return (keys >= first) & (keys < stop)
    else:
        return tl.load(masks + number * (BM * BN) + queries * BN + keys) != 0
