"""The backward kernels: the queries' gradient from their lists, the keys' and values' from the lists' transpose.

The transpose lists all (token, block) pairs sorted by block, so that the pairs that touch a tile of keys are
contiguous. Many tokens may choose the same block, and all choose their sequence's first. A tile's pairs are therefore
cut into parts of equal size. A program sums each part, and a last kernel adds the parts of each tile in order.
"""

from __future__ import annotations

import triton.language as tl


def selected_query_gradient(
    q, k, v, starts, positions, d_out, log_sums, deltas, d_query,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Computes d_query (B, T, N, H); log_sums (base 2) and deltas are (B, T, N)."""
    t, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, c, d = tl.arange(0, GP), tl.arange(0, BN), tl.arange(0, HP)
    head = (b * T + t) * (K * G) + kh * G + r
    there = (r[:, None] < G) & (d[None, :] < H)
    query = tl.load(q + head[:, None] * H + d[None, :], mask=there, other=0.0)
    grad = tl.load(d_out + head[:, None] * H + d[None, :], mask=there, other=0.0)
    z = tl.load(log_sums + head, mask=r < G, other=float("inf"))
    delta = tl.load(deltas + head, mask=r < G, other=0.0)
    position = tl.load(positions + b * T + t)
    blocks = ((b * T + t) * K + kh) * M
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
        w = tl.where(seen[None, :], tl.exp2(s - z[:, None]), 0.0)
        ds = w * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - delta[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    tl.store(d_query + head[:, None] * H + d[None, :], acc * SCALE, mask=there)


def selected_key_gradient(
    q, k, v, pairs, pair_starts, tiles, begins, ends, positions, d_out, log_sums, deltas, d_keys, d_values,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Computes d_keys and d_values (B, K, PARTS, BN, H), the sums of the parts.

    pairs (B, K, T * M) are token * M + place in the token's list, sorted by pair_starts, the first keys of their
    blocks. A part has the pairs begins to ends, which touch the keys of the tile `tiles`. The kernel processes BM / GP
    pairs at a time, with their G query heads.
    """
    part, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, c, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, HP)
    own = (b.to(tl.int64) * K + kh) * PARTS + part
    cols = tl.load(tiles + own) * BN + c
    at = ((b * S + cols[:, None]) * K + kh) * H + d[None, :]
    exists = (cols[:, None] < S) & (d[None, :] < H)
    key = tl.load(k + at, mask=exists, other=0.0)
    value = tl.load(v + at, mask=exists, other=0.0)
    d_key = tl.zeros([BN, HP], tl.float32)
    d_value = tl.zeros([BN, HP], tl.float32)
    end = tl.load(ends + own)
    for first in range(tl.load(begins + own), end, BM // GP):
        number, g = first + r // GP, r % GP
        real = (number < end) & (g < G)
        listed = (b * K + kh) * (T * M) + number
        t = tl.load(pairs + listed, mask=real, other=0) // M
        start = tl.load(pair_starts + listed, mask=real, other=S)
        position = tl.load(positions + b * T + t, mask=real, other=-1)
        head = (b * T + t) * (K * G) + kh * G + g
        there = real[:, None] & (d[None, :] < H)
        query = tl.load(q + head[:, None] * H + d[None, :], mask=there, other=0.0)
        grad = tl.load(d_out + head[:, None] * H + d[None, :], mask=there, other=0.0)
        z = tl.load(log_sums + head, mask=real, other=float("inf"))
        delta = tl.load(deltas + head, mask=real, other=0.0)
        seen = (cols[:, None] >= start[None, :]) & (cols[:, None] < start[None, :] + SIZE)
        seen = seen & (cols[:, None] <= position[None, :])
        s = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (SCALE * 1.4426950408889634)
        w = tl.where(seen, tl.exp2(s - z[None, :]), 0.0)
        d_value = tl.dot(w.to(grad.dtype), grad, d_value, input_precision=PRECISION)
        ds = w * (tl.dot(value, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        d_key = tl.dot(ds.to(query.dtype), query, d_key, input_precision=PRECISION)
    # The parts may have more than 2^31 numbers.
    at = c[:, None] * H + d[None, :]
    tl.store(d_keys + own * (BN * H) + at, d_key * SCALE, mask=d[None, :] < H)
    tl.store(d_values + own * (BN * H) + at, d_value, mask=d[None, :] < H)


def selected_sum_of_parts(
    d_keys, d_values, firsts, d_key, d_value,
    S: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Computes d_key and d_value (B, S, K, H); tile j has parts firsts[j] to firsts[j + 1] of (B, K, TILES + 1)."""
    j, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c, d = tl.arange(0, BN), tl.arange(0, HP)
    at_key = tl.zeros([BN, HP], tl.float32)
    at_value = tl.zeros([BN, HP], tl.float32)
    of_tile = firsts + (b * K + kh) * (TILES + 1) + j
    for part in range(tl.load(of_tile), tl.load(of_tile + 1)):
        own, at = ((b.to(tl.int64) * K + kh) * PARTS + part) * (BN * H), c[:, None] * H + d[None, :]
        at_key += tl.load(d_keys + own + at, mask=d[None, :] < H, other=0.0)
        at_value += tl.load(d_values + own + at, mask=d[None, :] < H, other=0.0)
    cols = j * BN + c
    at = ((b * S + cols[:, None]) * K + kh) * H + d[None, :]
    exists = (cols[:, None] < S) & (d[None, :] < H)
    tl.store(d_key + at, at_key.to(d_key.dtype.element_ty), mask=exists)
    tl.store(d_value + at, at_value.to(d_value.dtype.element_ty), mask=exists)
