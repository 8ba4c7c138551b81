"""The backward kernels: one for the gradient of each operand, without atomic additions.

Each recomputes the scores. The gradient of a weight is a product over all features of the values, which is summed over
tiles of them; the values' own gradient does not need it.
"""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_slopes, elementwise_weights, inside, offsets


def squared_relu_query_gradient(
    q, k, v, d_out, firsts, stops, d_query,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    V: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (B, T, N, H)."""
    VT: tl.constexpr = (V + VB - 1) // VB
    i, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = N // G
    c, d, features = tl.arange(0, BN), tl.arange(0, HP), tl.arange(0, VB)
    rows = i * BM + tl.arange(0, BM)
    at_q, there = offsets(b, rows, h, d, T, N, H), inside(rows, T, d, H)
    query = tl.load(q + at_q, mask=there, other=0.0)
    first = tl.load(firsts + b * T + rows, mask=rows < T, other=S)
    stop = tl.load(stops + b * T + rows, mask=rows < T, other=0)
    acc = tl.zeros([BM, HP], tl.float32)
    for start in range(tl.min(first, 0) // BN * BN, tl.max(stop, 0), BN):
        cols = start + c
        key = tl.load(k + offsets(b, cols, h // G, d, S, K, H), mask=inside(cols, S, d, H), other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = (cols[None, :] >= first[:, None]) & (cols[None, :] < stop[:, None])
        dp = tl.zeros([BM, BN], tl.float32)
        for tile in range(VT):
            e = tile * VB + features
            grad = tl.load(d_out + offsets(b, rows, h, e, T, N, V), mask=inside(rows, T, e, V), other=0.0)
            value = tl.load(v + offsets(b, cols, h // G, e, S, K, V), mask=inside(cols, S, e, V), other=0.0)
            dp = tl.dot(grad, tl.trans(value), dp, input_precision=PRECISION)
        ds = elementwise_slopes(tl.where(seen, s, 0.0), 1) * dp
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    tl.store(d_query + at_q, acc.to(d_query.dtype.element_ty), mask=there)


def squared_relu_key_gradient(
    q, k, v, d_out, firsts, stops, begins, ends, d_key,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    V: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_key (B, S, K, H); a program handles a block of keys and all query heads that share it."""
    VT: tl.constexpr = (V + VB - 1) // VB
    j, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K: tl.constexpr = N // G
    r, d, features = tl.arange(0, BM), tl.arange(0, HP), tl.arange(0, VB)
    cols = j * BN + tl.arange(0, BN)
    at_k, exists = offsets(b, cols, kh, d, S, K, H), inside(cols, S, d, H)
    key = tl.load(k + at_k, mask=exists, other=0.0)
    begin = tl.min(tl.load(begins + b * S + cols, mask=cols < S, other=T), 0)
    end = tl.max(tl.load(ends + b * S + cols, mask=cols < S, other=0), 0)
    acc = tl.zeros([BN, HP], tl.float32)
    for g in range(G):
        h = kh * G + g
        for start in range(begin // BM * BM, end, BM):
            rows = start + r
            query = tl.load(q + offsets(b, rows, h, d, T, N, H), mask=inside(rows, T, d, H), other=0.0)
            first = tl.load(firsts + b * T + rows, mask=rows < T, other=S)
            stop = tl.load(stops + b * T + rows, mask=rows < T, other=0)
            s = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            seen = (cols[:, None] >= first[None, :]) & (cols[:, None] < stop[None, :])
            dp = tl.zeros([BN, BM], tl.float32)
            for tile in range(VT):
                e = tile * VB + features
                grad = tl.load(d_out + offsets(b, rows, h, e, T, N, V), mask=inside(rows, T, e, V), other=0.0)
                value = tl.load(v + offsets(b, cols, kh, e, S, K, V), mask=inside(cols, S, e, V), other=0.0)
                dp = tl.dot(value, tl.trans(grad), dp, input_precision=PRECISION)
            ds = elementwise_slopes(tl.where(seen, s, 0.0), 1) * dp
            acc = tl.dot(ds.to(query.dtype), query, acc, input_precision=PRECISION)
    tl.store(d_key + at_k, acc.to(d_key.dtype.element_ty), mask=exists)


def squared_relu_value_gradient(
    q, k, d_out, firsts, stops, begins, ends, d_value,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    V: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes d_value (B, S, K, V); a program handles a block of keys, a tile of features, and all query heads that
    share the keys."""
    VT: tl.constexpr = (V + VB - 1) // VB
    j, kh, b = tl.program_id(0), tl.program_id(1) // VT, tl.program_id(2)
    K: tl.constexpr = N // G
    r, d, e = tl.arange(0, BM), tl.arange(0, HP), tl.program_id(1) % VT * VB + tl.arange(0, VB)
    cols = j * BN + tl.arange(0, BN)
    key = tl.load(k + offsets(b, cols, kh, d, S, K, H), mask=inside(cols, S, d, H), other=0.0)
    begin = tl.min(tl.load(begins + b * S + cols, mask=cols < S, other=T), 0)
    end = tl.max(tl.load(ends + b * S + cols, mask=cols < S, other=0), 0)
    acc = tl.zeros([BN, VB], tl.float32)
    for g in range(G):
        h = kh * G + g
        for start in range(begin // BM * BM, end, BM):
            rows = start + r
            query = tl.load(q + offsets(b, rows, h, d, T, N, H), mask=inside(rows, T, d, H), other=0.0)
            grad = tl.load(d_out + offsets(b, rows, h, e, T, N, V), mask=inside(rows, T, e, V), other=0.0)
            first = tl.load(firsts + b * T + rows, mask=rows < T, other=S)
            stop = tl.load(stops + b * T + rows, mask=rows < T, other=0)
            s = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            seen = (cols[:, None] >= first[None, :]) & (cols[:, None] < stop[None, :])
            p = elementwise_weights(tl.where(seen, s, 0.0), 1)
            acc = tl.dot(p.to(grad.dtype), grad, acc, input_precision=PRECISION)
    at_v = offsets(b, cols, kh, e, S, K, V)
    tl.store(d_value + at_v, acc.to(d_value.dtype.element_ty), mask=inside(cols, S, e, V))
