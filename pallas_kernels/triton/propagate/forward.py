"""The forward kernel of propagate: all compressed tokens are in one tile, which a program keeps for many rows."""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import elementwise_weights, inside, offsets


def propagate_forward(
    q, k, v, strength, out,
    T: tl.constexpr, M: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, SCALE: tl.constexpr,
    SEGMENT: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Computes out (B, T, N, H); a program handles SEGMENT rows of one head, BT at a time."""
    split, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols, d = tl.arange(0, BM), tl.arange(0, HP)
    at_k, exists = offsets(b, cols, h, d, M, N, H), inside(cols, M, d, H)
    key = tl.load(k + at_k, mask=exists, other=0.0)
    value = tl.load(v + at_k, mask=exists, other=0.0)
    weight = tl.load(strength + b * N + h)
    stop = tl.minimum((split + 1) * SEGMENT, T)
    for start in range(split * SEGMENT, stop, BT):
        rows = start + tl.arange(0, BT)
        at_q, there = offsets(b, rows, h, d, T, N, H), inside(rows, stop, d, H)
        query = tl.load(q + at_q, mask=there, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * SCALE
        factor = tl.zeros([BT], tl.float32) + weight
        if SCORE == 0:
            s = tl.where(cols[None, :] < M, s * 1.4426950408889634, float("-inf"))
            w = tl.exp2(s - tl.max(s, 1)[:, None])
            factor = factor / tl.sum(w, 1)
        else:
            w = elementwise_weights(s, SCORE)
        result = tl.dot(w.to(value.dtype), value, input_precision=PRECISION) * factor[:, None]
        tl.store(out + at_q, result.to(out.dtype.element_ty), mask=there)
