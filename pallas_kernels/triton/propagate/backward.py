"""The backward kernels of propagate: one by rows, one by compressed tokens. Neither uses atomic additions."""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_slopes, elementwise_weights, inside, offsets


def propagate_query_gradient(
    q, k, v, strength, d_out, d_query, log_sums, deltas, d_strength,
    T: tl.constexpr, M: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SCALE: tl.constexpr,
    SEGMENT: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Computes d_query (B, T, N, H), d_strength (B, N, SPLITS), and for the other kernel log_sums (base 2) and deltas
    (B, N, T)."""
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols, d = tl.arange(0, BM), tl.arange(0, HP)
    at_k, exists = offsets(b, cols, h, d, M, N, H), inside(cols, M, d, H)
    key = tl.load(k + at_k, mask=exists, other=0.0)
    value = tl.load(v + at_k, mask=exists, other=0.0)
    weight = tl.load(strength + b * N + h)
    summed = 0.0
    stop = tl.minimum((split + 1) * SEGMENT, T)
    for start in range(split * SEGMENT, stop, BT):
        rows = start + tl.arange(0, BT)
        at_q, there = offsets(b, rows, h, d, T, N, H), inside(rows, stop, d, H)
        query = tl.load(q + at_q, mask=there, other=0.0)
        grad = tl.load(d_out + at_q, mask=there, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        at_row = (b * N + h) * T + rows
        if SCORE == 0:
            s = tl.where(cols[None, :] < M, s * 1.4426950408889634, float("-inf"))
            top = tl.max(s, 1)
            w = tl.exp2(s - top[:, None])
            total = tl.sum(w, 1)
            w = w / total[:, None]
            e = tl.sum(w * dp, 1)
            ds = w * (dp - e[:, None])
            tl.store(log_sums + at_row, top + tl.log2(total), mask=rows < stop)
        else:
            w = elementwise_weights(s, SCORE)
            ds = elementwise_slopes(s, SCORE) * dp
            e = tl.sum(tl.where(cols[None, :] < M, w * dp, 0.0), 1)
            tl.store(log_sums + at_row, e * 0.0, mask=rows < stop)
        tl.store(deltas + at_row, e, mask=rows < stop)
        summed += tl.sum(tl.where(rows < stop, e, 0.0), 0)
        ds = ds * (weight * SCALE)
        result = tl.dot(ds.to(key.dtype), key, input_precision=PRECISION)
        tl.store(d_query + at_q, result.to(d_query.dtype.element_ty), mask=there)
    tl.store(d_strength + (b * N + h) * tl.num_programs(0) + split, summed)


def propagate_key_gradient(
    q, k, v, strength, d_out, log_sums, deltas, d_key, d_value,
    T: tl.constexpr, M: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, TILES: tl.constexpr,
    SEGMENT: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Computes d_key and d_value (SPLITS, B, N, M, H) in parts; a program handles BM compressed tokens, SEGMENT
    rows."""
    program, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, tile = program // TILES, program % TILES
    cols, d = tile * BM + tl.arange(0, BM), tl.arange(0, HP)
    at_k = offsets(b, cols, h, d, M, N, H)
    exists = inside(cols, M, d, H)
    key = tl.load(k + at_k, mask=exists, other=0.0)
    value = tl.load(v + at_k, mask=exists, other=0.0)
    weight = tl.load(strength + b * N + h)
    acc_k = tl.zeros([BM, HP], tl.float32)
    acc_v = tl.zeros([BM, HP], tl.float32)
    stop = tl.minimum((split + 1) * SEGMENT, T)
    for start in range(split * SEGMENT, stop, BT):
        rows = start + tl.arange(0, BT)
        at_q = offsets(b, rows, h, d, T, N, H)
        there = inside(rows, stop, d, H)
        query = tl.load(q + at_q, mask=there, other=0.0)
        grad = tl.load(d_out + at_q, mask=there, other=0.0)
        s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * SCALE
        dp = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        if SCORE == 0:
            z = tl.load(log_sums + (b * N + h) * T + rows, mask=rows < stop, other=float("inf"))
            e = tl.load(deltas + (b * N + h) * T + rows, mask=rows < stop, other=0.0)
            w = tl.exp2(s * 1.4426950408889634 - z[None, :])
            ds = w * (dp - e[None, :])
        else:
            w = elementwise_weights(s, SCORE)
            ds = elementwise_slopes(s, SCORE) * dp
        acc_v = tl.dot(w.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
        acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    at = (((split * tl.num_programs(2) + b) * N + h) * M + cols[:, None]) * H + d[None, :]
    tl.store(d_key + at, acc_k * (SCALE * weight), mask=exists)
    tl.store(d_value + at, acc_v * weight, mask=exists)
