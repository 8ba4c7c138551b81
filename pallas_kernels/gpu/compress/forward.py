"""The forward kernel of compress: each program reads a stretch of the history once, for one or both attentions."""

from __future__ import annotations

import triton.language as tl


def compress_forward(
    q, k1, k2, v, lengths, totals, tops, sums,
    M: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SPLITS: tl.constexpr,
    STRETCH: tl.constexpr, SCALE: tl.constexpr, SCORE: tl.constexpr, CONTRAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """totals (A, SPLITS, B, N, M, H), tops and sums (A, SPLITS, B, N, M), of each of the A attentions and stretches.

    tops are the maxima of scores times log2(e), -1e30 where no key was seen. Only softmax uses tops and sums.
    """
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    B = tl.num_programs(2)
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    inside = (r[:, None] < M) & (d[None, :] < H)
    query = tl.load(q + ((b * M + r[:, None]) * N + h) * H + d[None, :], mask=inside, other=0.0)
    m1 = tl.full([BM], -1e30, tl.float32)
    m2 = tl.full([BM], -1e30, tl.float32)
    l1 = tl.zeros([BM], tl.float32)
    l2 = tl.zeros([BM], tl.float32)
    a1 = tl.zeros([BM, HP], tl.float32)
    a2 = tl.zeros([BM, HP], tl.float32)
    stop = tl.minimum(tl.minimum((split + 1) * STRETCH, S), tl.load(lengths + b))
    for start in range(split * STRETCH, stop, BN):
        cols = start + tl.arange(0, BN)
        at = ((b * S + cols[:, None]) * N + h) * H + d[None, :]
        exists = (cols[:, None] < stop) & (d[None, :] < H)
        seen = cols[None, :] < stop
        key = tl.load(k1 + at, mask=exists, other=0.0)
        value = tl.load(v + at, mask=exists, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
        if SCORE == 0:
            s = tl.where(seen, s * 1.4426950408889634, float("-inf"))
            top = tl.maximum(m1, tl.max(s, 1))
            w = tl.exp2(s - top[:, None])
            shrink = tl.exp2(m1 - top)
            l1 = l1 * shrink + tl.sum(w, 1)
            a1 = a1 * shrink[:, None]
            m1 = top
        elif SCORE == 1:
            w = tl.where(seen, tl.maximum(s, 0.0) * tl.maximum(s, 0.0), 0.0)
        else:
            # The normal distribution function with mean sqrt(1/2) and variance 1 / (4 pi).
            w = tl.where(seen, 0.5 + 0.5 * tl.erf((s - 0.7071067811865476) * 2.5066282746310002), 0.0)
        a1 = tl.dot(w.to(value.dtype), value, a1, input_precision=PRECISION)
        if CONTRAST:
            key = tl.load(k2 + at, mask=exists, other=0.0)
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
            if SCORE == 0:
                s = tl.where(seen, s * 1.4426950408889634, float("-inf"))
                top = tl.maximum(m2, tl.max(s, 1))
                w = tl.exp2(s - top[:, None])
                shrink = tl.exp2(m2 - top)
                l2 = l2 * shrink + tl.sum(w, 1)
                a2 = a2 * shrink[:, None]
                m2 = top
            elif SCORE == 1:
                w = tl.where(seen, tl.maximum(s, 0.0) * tl.maximum(s, 0.0), 0.0)
            else:
                w = tl.where(seen, 0.5 + 0.5 * tl.erf((s - 0.7071067811865476) * 2.5066282746310002), 0.0)
            a2 = tl.dot(w.to(value.dtype), value, a2, input_precision=PRECISION)
    one = ((split * B + b) * N + h) * M
    tl.store(totals + (one + r[:, None]) * H + d[None, :], a1, mask=inside)
    tl.store(tops + one + r, m1, mask=r < M)
    tl.store(sums + one + r, l1, mask=r < M)
    if CONTRAST:
        two = (((SPLITS + split) * B + b) * N + h) * M
        tl.store(totals + (two + r[:, None]) * H + d[None, :], a2, mask=inside)
        tl.store(tops + two + r, m2, mask=r < M)
        tl.store(sums + two + r, l2, mask=r < M)
