"""The backward pass of compress in two kernels, one for the tokens' gradients and one for the history's.

The single kernel of `backward` holds the gradients of all tokens and of a tile of the history. Some GPUs have too few
registers for that. And where several blocks read the same keys, a program would have only one block's share of a key's
gradient. Here, the second kernel walks over the compressed tokens of every block that reads a tile of the history.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.compress.forward import segment, segment_and_block
from pallas_kernels.triton.core.functions import elementwise_slopes, elementwise_weights, inside, offsets


@triton.jit
def weights_and_slopes(products, dp, log_sums, deltas, seen, SCALE: tl.constexpr, SCORE: tl.constexpr):
    """Returns the weights of one attention, and the derivative of sum(weights * dp) with respect to its scores.

    log_sums, deltas and seen broadcast against the products."""
    scores = products * SCALE
    if SCORE == 0:
        weights = tl.where(seen, tl.exp2(scores * 1.4426950408889634 - log_sums), 0.0)
        slopes = tl.where(seen, weights * (dp - deltas), 0.0)
    else:
        weights = tl.where(seen, elementwise_weights(scores, SCORE), 0.0)
        slopes = tl.where(seen, elementwise_slopes(scores, SCORE) * dp, 0.0)
    return weights, slopes


def compress_token_gradient(
    q, k1, k2, v, lengths, d_out, log_sums, deltas, gamma, d_query,
    M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, SCALE: tl.constexpr,
    SCORE: tl.constexpr, CONTRAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (SPLITS, B, C, N, M, H) in parts; a program handles the tokens of a block and a segment of keys.

    Blocks are as in `compress_forward`. log_sums (base 2, +inf if a row saw nothing) and deltas are (A, B, C, N, M);
    only softmax uses them.
    """
    split, c = segment_and_block(STEP, SPLITS)
    h, b = tl.program_id(1), tl.program_id(2)
    row = b * C + c
    rows = tl.num_programs(2) * C
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    there = inside(r, M, d, H)
    at_q = offsets(row, r, h, d, M, N, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    grad = tl.load(d_out + at_q, mask=there, other=0.0)
    one, two = (row * N + h) * M + r, ((rows + row) * N + h) * M + r
    z1 = tl.load(log_sums + one, mask=r < M, other=float("inf"))
    e1 = tl.load(deltas + one, mask=r < M, other=0.0)
    if CONTRAST:
        z2 = tl.load(log_sums + two, mask=r < M, other=float("inf"))
        e2 = tl.load(deltas + two, mask=r < M, other=0.0)
        g = tl.load(gamma + b * N + h)
    acc = tl.zeros([BM, HP], tl.float32)
    first, stop = segment(split, tl.load(lengths + row), R, STEP, SEGMENT)
    for start in range(first, stop, BN):
        cols = start + tl.arange(0, BN)
        at = offsets(b, c * STEP + cols, h, d, S, N, H)
        exists = inside(cols, stop, d, H)
        seen = cols[None, :] < stop
        value = tl.load(v + at, mask=exists, other=0.0)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        key = tl.load(k1 + at, mask=exists, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        _, ds = weights_and_slopes(s, dp, z1[:, None], e1[:, None], seen, SCALE, SCORE)
        acc = tl.dot(ds.to(query.dtype), key, acc, input_precision=PRECISION)
        if CONTRAST:
            key = tl.load(k2 + at, mask=exists, other=0.0)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            _, ds = weights_and_slopes(s, dp, z2[:, None], e2[:, None], seen, SCALE, SCORE)
            acc = tl.dot((-g * ds).to(query.dtype), key, acc, input_precision=PRECISION)
    part = ((split * rows + row) * N + h) * M
    tl.store(d_query + (part + r[:, None]) * H + d[None, :], acc * SCALE, mask=there)


def compress_history_gradient(
    q, k1, k2, v, lengths, d_out, log_sums, deltas, gamma, d_k1, d_k2, d_v,
    M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, CONTRAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_k1, d_k2 and d_v (B, S, N, H); a program handles a tile of the history and loops over the tokens."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols, d = tile * BN + tl.arange(0, BN), tl.arange(0, HP)
    at = offsets(b, cols, h, d, S, N, H)
    exists = inside(cols, S, d, H)
    key = tl.load(k1 + at, mask=exists, other=0.0)
    value = tl.load(v + at, mask=exists, other=0.0)
    d_key = tl.zeros([BN, HP], tl.float32)
    d_value = tl.zeros([BN, HP], tl.float32)
    if CONTRAST:
        other = tl.load(k2 + at, mask=exists, other=0.0)
        d_other = tl.zeros([BN, HP], tl.float32)
        g = tl.load(gamma + b * N + h)
    # The blocks from `low` to before `high` read keys of this tile.
    if STEP > 0:
        low = tl.maximum(tile * BN - R + STEP, 0) // STEP
        high = tl.minimum((tile * BN + BN - 1) // STEP + 1, C)
    else:
        low, high = 0, 1
    TILES: tl.constexpr = (M + BM - 1) // BM
    for step in range(low * TILES, high * TILES):
        c, r = step // TILES, step % TILES * BM + tl.arange(0, BM)
        row = b * C + c
        length, place = tl.load(lengths + row), cols - c * STEP
        if STEP > 0:
            seen = ((place >= R - length) & (place < R))[:, None]
        else:
            seen = (place < length)[:, None]
        there = inside(r, M, d, H)
        at_q = offsets(row, r, h, d, M, N, H)
        query = tl.load(q + at_q, mask=there, other=0.0)
        grad = tl.load(d_out + at_q, mask=there, other=0.0)
        # Rows beyond M have no query and no gradient, so they add nothing.
        one, two = (row * N + h) * M + r, ((tl.num_programs(2) * C + row) * N + h) * M + r
        z = tl.load(log_sums + one, mask=r < M, other=float("inf"))
        e = tl.load(deltas + one, mask=r < M, other=0.0)
        dp = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        s = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        w, ds = weights_and_slopes(s, dp, z[None, :], e[None, :], seen, SCALE, SCORE)
        d_key = tl.dot(ds.to(query.dtype), query, d_key, input_precision=PRECISION)
        if CONTRAST:
            z = tl.load(log_sums + two, mask=r < M, other=float("inf"))
            e = tl.load(deltas + two, mask=r < M, other=0.0)
            s = tl.dot(other, tl.trans(query), input_precision=PRECISION)
            w2, ds = weights_and_slopes(s, dp, z[None, :], e[None, :], seen, SCALE, SCORE)
            d_other = tl.dot((-g * ds).to(query.dtype), query, d_other, input_precision=PRECISION)
            w = w - g * w2
        d_value = tl.dot(w.to(grad.dtype), grad, d_value, input_precision=PRECISION)
    tl.store(d_k1 + at, (d_key * SCALE).to(d_k1.dtype.element_ty), mask=exists)
    tl.store(d_v + at, d_value.to(d_v.dtype.element_ty), mask=exists)
    if CONTRAST:
        tl.store(d_k2 + at, (d_other * SCALE).to(d_k2.dtype.element_ty), mask=exists)
