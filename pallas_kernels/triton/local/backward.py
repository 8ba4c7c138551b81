"""The backward kernels: the queries' gradient by blocks of queries, the keys' and values' by blocks of keys.

Neither uses atomic additions, so results are the same in every run. Probabilities are recomputed from the saved
log-sum-exp (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import base2_scores, inside, offsets, seen_pairs


def local_query_gradient(
    q, k, v, out, d_out, log_sums, d_log_sums, starts, middles, others, mask_numbers, masks, query_ids, key_ids,
    d_query, delta,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, SEGMENTS: tl.constexpr, LOG_SUMS: tl.constexpr,
    CONSECUTIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (B, T, N, H), and delta (B, N, T): row sums of out * d_out minus the log-sum-exp's gradient."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = N // G
    r, c, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HP)
    rows = i * BM + r
    at_q = offsets(b, rows, h, d, T, N, H)
    at_row = (b * N + h) * T + rows
    there = inside(rows, T, d, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    grad = tl.load(d_out + at_q, mask=there, other=0.0)
    result = tl.load(out + at_q, mask=there, other=0.0)
    e = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    if LOG_SUMS:
        e -= tl.load(d_log_sums + at_row, mask=rows < T, other=0.0)
    tl.store(delta + at_row, e, mask=rows < T)
    z = tl.load(log_sums + at_row, mask=rows < T, other=float("inf"))
    if SEGMENTS:
        query_id = tl.load(query_ids + b * T + rows, mask=rows < T, other=0)
    acc = tl.zeros([BM, HP], tl.float32)
    first, middle, last = tl.load(starts + i), tl.load(middles + i), tl.load(starts + i + 1)
    for masked in tl.static_range(2):
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
            s, slope = base2_scores(tl.dot(query, tl.trans(key), input_precision=PRECISION), SCALE, CAP)
            p = tl.exp2(s - z[:, None])
            if masked == 1:
                number = tl.load(mask_numbers + pair)
                seen = seen_pairs(masks, number, r[:, None], c[None, :], BM, BN, CONSECUTIVE)
                p = tl.where(seen, p, 0.0)
            if SEGMENTS:
                key_id = tl.load(key_ids + b * S + cols, mask=cols < S, other=0)
                p = tl.where(query_id[:, None] == key_id[None, :], p, 0.0)
            ds = p * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - e[:, None])
            if CAP > 0:
                ds = ds * slope
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    tl.store(d_query + at_q, (acc * SCALE).to(d_query.dtype.element_ty), mask=there)


def local_key_gradient(
    q, k, v, d_out, log_sums, delta, starts, middles, others, mask_numbers, masks, query_ids, key_ids, d_key, d_value,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, SEGMENTS: tl.constexpr, CONSECUTIVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_key and d_value (B, S, K, H); a program handles a block of keys and all query heads that share it."""
    j, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = N // G
    r, c, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HP)
    cols = j * BN + c
    at_k = offsets(b, cols, kh, d, S, K, H)
    exists = inside(cols, S, d, H)
    key = tl.load(k + at_k, mask=exists, other=0.0)
    value = tl.load(v + at_k, mask=exists, other=0.0)
    if SEGMENTS:
        key_id = tl.load(key_ids + b * S + cols, mask=cols < S, other=0)
    acc_k = tl.zeros([BN, HP], tl.float32)
    acc_v = tl.zeros([BN, HP], tl.float32)
    first, middle, last = tl.load(starts + j), tl.load(middles + j), tl.load(starts + j + 1)
    for g in range(G):
        h = kh * G + g
        for masked in tl.static_range(2):
            if masked == 0:
                begin, end = middle, last
            else:
                begin, end = first, middle
            for pair in range(begin, end):
                rows = tl.load(others + pair) * BM + r
                at_q = offsets(b, rows, h, d, T, N, H)
                there = inside(rows, T, d, H)
                query = tl.load(q + at_q, mask=there, other=0.0)
                grad = tl.load(d_out + at_q, mask=there, other=0.0)
                z = tl.load(log_sums + (b * N + h) * T + rows, mask=rows < T, other=float("inf"))
                e = tl.load(delta + (b * N + h) * T + rows, mask=rows < T, other=0.0)
                s, slope = base2_scores(tl.dot(key, tl.trans(query), input_precision=PRECISION), SCALE, CAP)
                p = tl.exp2(s - z[None, :])
                if masked == 1:
                    number = tl.load(mask_numbers + pair)
                    seen = seen_pairs(masks, number, r[None, :], c[:, None], BM, BN, CONSECUTIVE)
                    p = tl.where(seen, p, 0.0)
                if SEGMENTS:
                    query_id = tl.load(query_ids + b * T + rows, mask=rows < T, other=0)
                    p = tl.where(key_id[:, None] == query_id[None, :], p, 0.0)
                acc_v = tl.dot(p.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
                ds = p * (tl.dot(value, tl.trans(grad), input_precision=PRECISION) - e[None, :])
                if CAP > 0:
                    ds = ds * slope
                acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision=PRECISION)
    tl.store(d_key + at_k, (acc_k * SCALE).to(d_key.dtype.element_ty), mask=exists)
    tl.store(d_value + at_k, acc_v.to(d_value.dtype.element_ty), mask=exists)
