"""The backward pass of compress in two kernels, for GPUs with too few registers for the single kernel of `backward`.

That kernel holds the gradients of all tokens and of a block of the history. Here, one kernel computes the tokens'
gradients and the other the history's, tile by tile of the compressed tokens. Each reads the history once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_slopes, elementwise_weights, inside, offsets


@triton.jit
def weights_and_slopes(products, dp, log_sums, deltas, seen, SCALE: tl.constexpr, SCORE: tl.constexpr):
    """Returns the weights of one attention, and the derivative of sum(weights * dp) with respect to its scores."""
    scores = products * SCALE
    if SCORE == 0:
        weights = tl.where(seen, tl.exp2(scores * 1.4426950408889634 - log_sums[:, None]), 0.0)
        slopes = weights * (dp - deltas[:, None])
    else:
        weights = tl.where(seen, elementwise_weights(scores, SCORE), 0.0)
        slopes = tl.where(seen, elementwise_slopes(scores, SCORE) * dp, 0.0)
    return weights, slopes


def compress_token_gradient(
    q, k1, k2, v, lengths, d_out, log_sums, deltas, gamma, d_query,
    M: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SPLITS: tl.constexpr,
    SEGMENT: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, CONTRAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (SPLITS, B, N, M, H) in parts; a program handles all tokens and a segment of the history.

    log_sums (base 2, +inf if a row saw nothing) and deltas are (A, B, N, M); only softmax uses them.
    """
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    B = tl.num_programs(2)
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    there = inside(r, M, d, H)
    at_q = offsets(b, r, h, d, M, N, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    grad = tl.load(d_out + at_q, mask=there, other=0.0)
    row, second = (b * N + h) * M + r, (B * N) * M
    z1 = tl.load(log_sums + row, mask=r < M, other=float("inf"))
    e1 = tl.load(deltas + row, mask=r < M, other=0.0)
    if CONTRAST:
        z2 = tl.load(log_sums + second + row, mask=r < M, other=float("inf"))
        e2 = tl.load(deltas + second + row, mask=r < M, other=0.0)
        g = tl.load(gamma + b * N + h)
    acc = tl.zeros([BM, HP], tl.float32)
    stop = tl.minimum(tl.minimum((split + 1) * SEGMENT, S), tl.load(lengths + b))
    for start in range(split * SEGMENT, stop, BN):
        cols = start + tl.arange(0, BN)
        at = offsets(b, cols, h, d, S, N, H)
        exists = inside(cols, stop, d, H)
        seen = cols[None, :] < stop
        value = tl.load(v + at, mask=exists, other=0.0)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        key = tl.load(k1 + at, mask=exists, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        _, ds = weights_and_slopes(s, dp, z1, e1, seen, SCALE, SCORE)
        acc = tl.dot(ds.to(query.dtype), key, acc, input_precision=PRECISION)
        if CONTRAST:
            key = tl.load(k2 + at, mask=exists, other=0.0)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            _, ds = weights_and_slopes(s, dp, z2, e2, seen, SCALE, SCORE)
            acc = tl.dot((-g * ds).to(query.dtype), key, acc, input_precision=PRECISION)
    part = ((split * B + b) * N + h) * M
    tl.store(d_query + (part + r[:, None]) * H + d[None, :], acc * SCALE, mask=there)


def compress_history_gradient(
    q, k1, k2, v, lengths, d_out, log_sums, deltas, gamma, d_k1, d_k2, d_v,
    M: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SCALE: tl.constexpr,
    SCORE: tl.constexpr, CONTRAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_k1, d_k2 and d_v (B, S, N, H); a program handles a block of the history and loops over tokens."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    B = tl.num_programs(2)
    cols, d = block * BN + tl.arange(0, BN), tl.arange(0, HP)
    stop = tl.minimum(S, tl.load(lengths + b))
    at = offsets(b, cols, h, d, S, N, H)
    exists = inside(cols, stop, d, H)
    seen = cols[None, :] < stop
    key = tl.load(k1 + at, mask=exists, other=0.0)
    value = tl.load(v + at, mask=exists, other=0.0)
    d_key = tl.zeros([BN, HP], tl.float32)
    d_value = tl.zeros([BN, HP], tl.float32)
    if CONTRAST:
        other = tl.load(k2 + at, mask=exists, other=0.0)
        d_other = tl.zeros([BN, HP], tl.float32)
        g = tl.load(gamma + b * N + h)
    second = (B * N) * M
    for start in range(0, M, BM):
        r = start + tl.arange(0, BM)
        there = inside(r, M, d, H)
        at_q = offsets(b, r, h, d, M, N, H)
        query = tl.load(q + at_q, mask=there, other=0.0)
        grad = tl.load(d_out + at_q, mask=there, other=0.0)
        row = (b * N + h) * M + r
        # Rows beyond M have no query and no gradient, so they add nothing.
        z = tl.load(log_sums + row, mask=r < M, other=float("inf"))
        e = tl.load(deltas + row, mask=r < M, other=0.0)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        w, ds = weights_and_slopes(s, dp, z, e, seen, SCALE, SCORE)
        d_key = tl.dot(tl.trans(ds.to(query.dtype)), query, d_key, input_precision=PRECISION)
        if CONTRAST:
            z = tl.load(log_sums + second + row, mask=r < M, other=float("inf"))
            e = tl.load(deltas + second + row, mask=r < M, other=0.0)
            s = tl.dot(query, tl.trans(other), input_precision=PRECISION)
            w2, ds = weights_and_slopes(s, dp, z, e, seen, SCALE, SCORE)
            d_other = tl.dot(tl.trans((-g * ds).to(query.dtype)), query, d_other, input_precision=PRECISION)
            w = w - g * w2
        d_value = tl.dot(tl.trans(w.to(grad.dtype)), grad, d_value, input_precision=PRECISION)
    inside_array = inside(cols, S, d, H)
    tl.store(d_k1 + at, (d_key * SCALE).to(d_k1.dtype.element_ty), mask=inside_array)
    tl.store(d_v + at, d_value.to(d_v.dtype.element_ty), mask=inside_array)
    if CONTRAST:
        tl.store(d_k2 + at, (d_other * SCALE).to(d_k2.dtype.element_ty), mask=inside_array)
