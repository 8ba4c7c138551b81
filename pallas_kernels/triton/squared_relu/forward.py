"""The forward kernel: one program for each block of queries, head and tile of the values' features."""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_weights, inside, offsets


def squared_relu_forward(
    q, k, v, firsts, stops, out,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    V: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes out (B, T, N, V)."""
    VT: tl.constexpr = (V + VB - 1) // VB
    # In causal attention the last queries see the most keys, so they start first.
    i, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1) // VT, tl.program_id(2)
    K: tl.constexpr = N // G
    c, d, e = tl.arange(0, BN), tl.arange(0, HP), tl.program_id(1) % VT * VB + tl.arange(0, VB)
    rows = i * BM + tl.arange(0, BM)
    query = tl.load(q + offsets(b, rows, h, d, T, N, H), mask=inside(rows, T, d, H), other=0.0)
    first = tl.load(firsts + b * T + rows, mask=rows < T, other=S)
    stop = tl.load(stops + b * T + rows, mask=rows < T, other=0)
    acc = tl.zeros([BM, VB], tl.float32)
    for start in range(tl.min(first, 0) // BN * BN, tl.max(stop, 0), BN):
        cols = start + c
        key = tl.load(k + offsets(b, cols, h // G, d, S, K, H), mask=inside(cols, S, d, H), other=0.0)
        value = tl.load(v + offsets(b, cols, h // G, e, S, K, V), mask=inside(cols, S, e, V), other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = (cols[None, :] >= first[:, None]) & (cols[None, :] < stop[:, None])
        p = elementwise_weights(tl.where(seen, s, 0.0), 1)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    # The result may have more than 2^31 numbers.
    row = out + b.to(tl.int64) * (T * N * V)
    at = offsets(0, rows, h, e, T, N, V)
    tl.store(row + at, acc.to(out.dtype.element_ty), mask=inside(rows, T, e, V))
