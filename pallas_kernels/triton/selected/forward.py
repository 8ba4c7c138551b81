"""The forward kernel: one program for each token and key head, over the blocks of keys in the token's list."""

# ruff: noqa: E741
from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.core.functions import softmax_step


def selected_forward(
    q, k, v, starts, positions, out, log_sums,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Computes out (B, T, N, H) and the base-2 log-sum-exp (B, T, N) of scores times log2(e).

    It treats the M blocks of SIZE keys as one row of M * SIZE places, BN at a time, so that any size works.
    """
    t, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, c, d = tl.arange(0, GP), tl.arange(0, BN), tl.arange(0, HP)
    head = (b * T + t) * (K * G) + kh * G + r
    there = (r[:, None] < G) & (d[None, :] < H)
    query = tl.load(q + head[:, None] * H + d[None, :], mask=there, other=0.0)
    position = tl.load(positions + b * T + t)
    blocks = ((b * T + t) * K + kh) * M
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, HP], tl.float32)
    for first in range(0, M * SIZE, BN):
        place = first + c
        start = tl.load(starts + blocks + place // SIZE, mask=place < M * SIZE, other=S)
        cols = start + place % SIZE
        seen = cols <= position
        at = ((b * S + cols[:, None]) * K + kh) * H + d[None, :]
        exists = seen[:, None] & (d[None, :] < H)
        key = tl.load(k + at, mask=exists, other=0.0)
        value = tl.load(v + at, mask=exists, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (SCALE * 1.4426950408889634)
        s = tl.where(seen[None, :], s, float("-inf"))
        p, m, l, acc = softmax_step(s, m, l, acc)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    total = tl.where(l == 0.0, 1.0, l)
    tl.store(out + head[:, None] * H + d[None, :], acc / total[:, None], mask=there)
    tl.store(log_sums + head, tl.where(l == 0.0, float("inf"), m + tl.log2(total)), mask=r < G)
