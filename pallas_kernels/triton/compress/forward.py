"""The forward kernel of compress: each program reads a segment of the history once, for one or both attentions."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_weights, inside, offsets, softmax_step


@triton.jit
def segment_and_block(STEP: tl.constexpr, SPLITS: tl.constexpr):
    """Returns the segment and the block of this program."""
    if STEP > 0:
        return tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    else:
        return tl.program_id(0), 0


@triton.jit
def segment(split, length, R: tl.constexpr, STEP: tl.constexpr, SEGMENT: tl.constexpr):
    """Returns the first key that exists in a segment of a history, counted from the history's start, and its end."""
    first, stop = split * SEGMENT, tl.minimum((split + 1) * SEGMENT, R)
    if STEP > 0:
        return tl.maximum(first, R - length), stop
    else:
        return first, tl.minimum(stop, length)


@triton.jit
def normalised(totals, tops, sums):
    """Returns the results and base-2 log-sum-exps of rows; 0 and inf of a row that sees no key."""
    blind = sums == 0.0
    sums = tl.where(blind, 1.0, sums)
    return totals / sums[:, None], tl.where(blind, float("inf"), tops + tl.log2(sums))


def compress_forward(
    q, k1, k2, v, lengths, totals, tops, sums,
    M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, SCALE: tl.constexpr,
    SCORE: tl.constexpr, CONTRAST: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes totals (A, SPLITS, B, C, M, N, H), tops and sums (A, SPLITS, B, C, N, M) for each attention and segment.

    Block c reads the R keys from c * STEP on, and only the last `length` exist. With STEP 0 there is one block, and
    only the first `length` exist. tops are the maxima of scores times log2(e), -1e30 if no key was seen. Where a
    history is one segment, totals are the results, and tops the base-2 log-sum-exps, inf if no key was seen. Only
    softmax uses tops and sums.
    """
    split, c = segment_and_block(STEP, SPLITS)
    h, b = tl.program_id(1), tl.program_id(2)
    row = b * C + c
    rows = tl.num_programs(2) * C
    r, d = tl.arange(0, BM), tl.arange(0, HP)
    there = inside(r, M, d, H)
    query = tl.load(q + offsets(row, r, h, d, M, N, H), mask=there, other=0.0)
    m1 = tl.full([BM], -1e30, tl.float32)
    m2 = tl.full([BM], -1e30, tl.float32)
    l1 = tl.zeros([BM], tl.float32)
    l2 = tl.zeros([BM], tl.float32)
    a1 = tl.zeros([BM, HP], tl.float32)
    a2 = tl.zeros([BM, HP], tl.float32)
    first, stop = segment(split, tl.load(lengths + row), R, STEP, SEGMENT)
    for start in range(first, stop, BN):
        cols = start + tl.arange(0, BN)
        at = offsets(b, c * STEP + cols, h, d, S, N, H)
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
    if SPLITS == 1 and SCORE == 0:
        a1, m1 = normalised(a1, m1, l1)
        if CONTRAST:
            a2, m2 = normalised(a2, m2, l2)
    # A result may have more than 2^31 numbers.
    part, at = split.to(tl.int64) * rows, offsets(row, r, h, d, M, N, H)
    one = ((split * rows + row) * N + h) * M
    tl.store(totals + part * (M * N * H) + at, a1, mask=there)
    tl.store(tops + one + r, m1, mask=r < M)
    tl.store(sums + one + r, l1, mask=r < M)
    if CONTRAST:
        two = (((SPLITS + split) * rows + row) * N + h) * M
        tl.store(totals + (part + SPLITS * rows) * (M * N * H) + at, a2, mask=there)
        tl.store(tops + two + r, m2, mask=r < M)
        tl.store(sums + two + r, l2, mask=r < M)
