"""The backward kernel of compress: one program for each segment of the history, which it reads once."""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_slopes, elementwise_weights, inside, offsets


def compress_gradient(
    q, k1, k2, v, lengths, d_out, log_sums, deltas, gamma, d_query, d_k1, d_k2, d_v,
    M: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SEGMENT: tl.constexpr,
    SCALE: tl.constexpr, SCORE: tl.constexpr, CONTRAST: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (SPLITS, B, N, M, H), in parts, and d_k1, d_k2 and d_v (B, S, N, H).

    EVEN means that every key exists and every block is full, so that nothing needs a mask. log_sums (base 2, +inf if a
    row saw nothing) and deltas are (A, B, N, M); only softmax uses them.
    """
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    B = tl.num_programs(2)
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    there = inside(r, M, d, H)
    at_q = offsets(b, r, h, d, M, N, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    grad = tl.load(d_out + at_q, mask=there, other=0.0)
    row = (b * N + h) * M + r
    z1 = tl.load(log_sums + row, mask=r < M, other=float("inf"))
    e1 = tl.load(deltas + row, mask=r < M, other=0.0)
    acc = tl.zeros([BM, HP], tl.float32)
    end = tl.minimum((split + 1) * SEGMENT, S)
    length = tl.load(lengths + b)
    for start in range(split * SEGMENT, end, BN):
        cols = start + tl.arange(0, BN)
        at = offsets(b, cols, h, d, S, N, H)
        width = d[None, :] < H
        exists = (cols[:, None] < end) & (cols[:, None] < length) & width
        seen = ((cols < end) & (cols < length))[
            None, :
        ]  # rows beyond M have no gradient, so they add nothing
        if EVEN:
            key = tl.load(k1 + at)
            value = tl.load(v + at)
        else:
            key = tl.load(k1 + at, mask=exists, other=0.0)
            value = tl.load(v + at, mask=exists, other=0.0)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
        if SCORE == 0:
            w = tl.exp2(s * 1.4426950408889634 - z1[:, None])
            if not EVEN:
                w = tl.where(seen, w, 0.0)
            ds = w * (dp - e1[:, None])
        else:
            w = tl.where(seen, elementwise_weights(s, SCORE), 0.0)
            ds = tl.where(seen, elementwise_slopes(s, SCORE) * dp, 0.0)
        ds_narrow = ds.to(query.dtype)
        acc = tl.dot(ds_narrow, key, acc, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(ds_narrow), query, input_precision=PRECISION) * SCALE
        if EVEN:
            tl.store(d_k1 + at, d_key.to(d_k1.dtype.element_ty))
        else:
            tl.store(d_k1 + at, d_key.to(d_k1.dtype.element_ty), mask=(cols[:, None] < end) & width)
        if CONTRAST:
            z2 = tl.load(log_sums + (B * N) * M + row, mask=r < M, other=float("inf"))
            e2 = tl.load(deltas + (B * N) * M + row, mask=r < M, other=0.0)
            g = tl.load(gamma + b * N + h)
            if EVEN:
                key = tl.load(k2 + at)
            else:
                key = tl.load(k2 + at, mask=exists, other=0.0)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
            if SCORE == 0:
                w2 = tl.exp2(s * 1.4426950408889634 - z2[:, None]) * g
                if not EVEN:
                    w2 = tl.where(seen, w2, 0.0)
                ds = -w2 * (dp - e2[:, None])
            else:
                w2 = tl.where(seen, elementwise_weights(s, SCORE), 0.0) * g
                ds = tl.where(seen, -g * elementwise_slopes(s, SCORE) * dp, 0.0)
            w = w - w2
            ds_narrow = ds.to(query.dtype)
            acc = tl.dot(ds_narrow, key, acc, input_precision=PRECISION)
            d_key = tl.dot(tl.trans(ds_narrow), query, input_precision=PRECISION) * SCALE
            if EVEN:
                tl.store(d_k2 + at, d_key.to(d_k2.dtype.element_ty))
            else:
                tl.store(d_k2 + at, d_key.to(d_k2.dtype.element_ty), mask=(cols[:, None] < end) & width)
        d_value = tl.dot(tl.trans(w.to(grad.dtype)), grad, input_precision=PRECISION)
        if EVEN:
            tl.store(d_v + at, d_value.to(d_v.dtype.element_ty))
        else:
            tl.store(d_v + at, d_value.to(d_v.dtype.element_ty), mask=(cols[:, None] < end) & width)
    part = ((split * B + b) * N + h) * M
    tl.store(d_query + (part + r[:, None]) * H + d[None, :], acc * SCALE, mask=there)
