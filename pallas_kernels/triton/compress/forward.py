"""The forward kernel of compress: each program reads a segment of the history once, for one or both attentions."""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_weights, inside, offsets, softmax_step


def compress_forward(
    q, k1, k2, v, lengths, totals, tops, sums,
    M: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SPLITS: tl.constexpr,
    SEGMENT: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, CONTRAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes totals (A, SPLITS, B, N, M, H), tops and sums (A, SPLITS, B, N, M) for each attention and segment.

    tops are the maxima of scores times log2(e), -1e30 if no key was seen. Only softmax uses tops and sums.
    """
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    B = tl.num_programs(2)
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    there = inside(r, M, d, H)
    query = tl.load(q + offsets(b, r, h, d, M, N, H), mask=there, other=0.0)
    m1 = tl.full([BM], -1e30, tl.float32)
    m2 = tl.full([BM], -1e30, tl.float32)
    l1 = tl.zeros([BM], tl.float32)
    l2 = tl.zeros([BM], tl.float32)
    a1 = tl.zeros([BM, HP], tl.float32)
    a2 = tl.zeros([BM, HP], tl.float32)
    stop = tl.minimum(tl.minimum((split + 1) * SEGMENT, S), tl.load(lengths + b))
    for start in range(split * SEGMENT, stop, BN):
        cols = start + tl.arange(0, BN)
        at = offsets(b, cols, h, d, S, N, H)
        exists = inside(cols, stop, d, H)
        seen = cols[None, :] < stop
        key = tl.load(k1 + at, mask=exists, other=0.0)
        value = tl.load(v + at, mask=exists, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
        if SCORE == 0:
            s = tl.where(seen, s * 1.4426950408889634, float("-inf"))
            w, m1, l1, a1 = softmax_step(s, m1, l1, a1)
        else:
            w = tl.where(seen, elementwise_weights(s, SCORE), 0.0)
        a1 = tl.dot(w.to(value.dtype), value, a1, input_precision=PRECISION)
        if CONTRAST:
            key = tl.load(k2 + at, mask=exists, other=0.0)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
            if SCORE == 0:
                s = tl.where(seen, s * 1.4426950408889634, float("-inf"))
                w, m2, l2, a2 = softmax_step(s, m2, l2, a2)
            else:
                w = tl.where(seen, elementwise_weights(s, SCORE), 0.0)
            a2 = tl.dot(w.to(value.dtype), value, a2, input_precision=PRECISION)
    one = ((split * B + b) * N + h) * M
    tl.store(totals + (one + r[:, None]) * H + d[None, :], a1, mask=there)
    tl.store(tops + one + r, m1, mask=r < M)
    tl.store(sums + one + r, l1, mask=r < M)
    if CONTRAST:
        two = (((SPLITS + split) * B + b) * N + h) * M
        tl.store(totals + (two + r[:, None]) * H + d[None, :], a2, mask=there)
        tl.store(tops + two + r, m2, mask=r < M)
        tl.store(sums + two + r, l2, mask=r < M)
