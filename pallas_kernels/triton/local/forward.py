"""The forward kernel: one program for each block of queries and head, over the blocks of keys in its list."""

# ruff: noqa: E741
from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import base2_scores, inside, offsets, seen_pairs, softmax_step


def local_forward(
    q, k, v, starts, middles, others, mask_numbers, masks, query_ids, key_ids, sinks, out, log_sums,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, SEGMENTS: tl.constexpr, SINKS: tl.constexpr,
    CONSECUTIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes out (B, T, N, H) and the base-2 log-sum-exp (B, N, T); a query that sees nothing gets 0 and +inf."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = N // G
    r, c, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HP)
    rows = i * BM + r
    at_q = offsets(b, rows, h, d, T, N, H)
    there = inside(rows, T, d, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    m = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        sink = tl.load(sinks + b * N + h) * 1.4426950408889634
        m = tl.maximum(m, sink)
        l = tl.exp2(sink - m)
    acc = tl.zeros([BM, HP], tl.float32)
    if SEGMENTS:
        query_id = tl.load(query_ids + b * T + rows, mask=rows < T, other=0)
    first, middle, last = tl.load(starts + i), tl.load(middles + i), tl.load(starts + i + 1)
    for masked in tl.static_range(2):  # whole blocks first, then blocks with a mask
        if masked == 0:
            begin, end = middle, last
        else:
            begin, end = first, middle
        for pair in range(begin, end):
            cols = tl.load(others + pair) * BN + c
            at_k = offsets(b, cols, h // G, d, S, K, H)
            exists = inside(cols, S, d, H)
            key = tl.load(k + at_k, mask=exists, other=0.0)
            value = tl.load(v + at_k, mask=exists, other=0.0)
            s, _ = base2_scores(tl.dot(query, tl.trans(key), input_precision=PRECISION), SCALE, CAP)
            if masked == 1:
                number = tl.load(mask_numbers + pair)
                seen = seen_pairs(masks, number, r[:, None], c[None, :], BM, BN, CONSECUTIVE)
                s = tl.where(seen, s, float("-inf"))
            if SEGMENTS:
                key_id = tl.load(key_ids + b * S + cols, mask=cols < S, other=0)
                s = tl.where(query_id[:, None] == key_id[None, :], s, float("-inf"))
            p, m, l, acc = softmax_step(s, m, l, acc)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    total = tl.where(l == 0.0, 1.0, l)
    tl.store(out + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
    log_sum = tl.where(l == 0.0, float("inf"), m + tl.log2(total))
    tl.store(log_sums + (b * N + h) * T + rows, log_sum, mask=rows < T)
