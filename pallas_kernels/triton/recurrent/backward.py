"""Sums of outer products, backward: the gradients of queries, of keys and values, and of the decays.

The gradient of a logarithm is the sum of what flows across its token: of the pairs of tokens on either side of it, of
the reads from the state before the chunk, and of the writes to the state after it. The kernels of queries and keys add
these up for their own tokens and `recurrent_decay_gradient` sums them over a chunk. What flows to queries and from keys
of one chunk cancels in those sums, so both kernels round the same products: the gradient of a pair's score times its
whole decay. A program has one tile of the values' features, and its gradients of queries and keys are a part of the
whole where there are several.
"""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.recurrent.functions import (
    log_decays,
    logs_after,
    logs_between,
    logs_between_transposed,
    segment_after,
    segment_before,
    segment_numbers,
    store_numbers,
    store_tokens,
    token_numbers,
    tokens_by_features,
)


def recurrent_query_gradient(
    q, k, v, log, segments, states, d_out, d_weight, d_query, flow,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, WEIGHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_query (B, tiles, T, N, F), and flow (B, tiles, T, N): what flows to each query."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    E: tl.constexpr = F * V + (F if WEIGHS else 0)
    h, vt, b = tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first, kh = tl.program_id(0) * BM, h // G
    c = first // CHUNK
    r, n, f, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    query = tokens_by_features(q, b, first, r, h, f, T, N, F)
    grad = tokens_by_features(d_out, b, first, r, h, e, T, N, V)
    if WEIGHS:
        extra = tl.where(vt == 0, token_numbers(d_weight, b, first, r, h, T, N), 0.0)
    acc = tl.zeros([BM, FP], tl.float32)
    gap = 0.0
    if DECAY:
        logs = log_decays(log, b, first, r, kh, T, K)
        start = tl.cumsum(logs, 0)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
    for j in tl.static_range(BM // BN):
        key = tokens_by_features(k, b, first + j * BN, n, kh, f, T, K, F)
        value = tokens_by_features(v, b, first + j * BN, n, kh, e, T, K, V)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        if WEIGHS:
            dp += extra[:, None]
        seen = r[:, None] >= j * BN + n[None, :]
        if DECAY:
            dp *= tl.exp(logs_between(logs, r, j * BN + n))
        if SEGMENTS:
            others = segment_numbers(segments, b, first + j * BN, n, T)
            seen = seen & (own[:, None] == others[None, :]) & (others >= 0)[None, :]
        dp = tl.where(seen, dp, 0.0)
        acc = tl.dot(dp.to(key.dtype), key, acc, input_precision=PRECISION)
    for m in range((first - c * CHUNK) // BN):
        begin = first - (m + 1) * BN
        key = tokens_by_features(k, b, begin, n, kh, f, T, K, F)
        value = tokens_by_features(v, b, begin, n, kh, e, T, K, V)
        dp = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        if WEIGHS:
            dp += extra[:, None]
        if DECAY:
            end = logs_after(log, b, begin, n, kh, T, K, BN) + gap
            dp *= tl.exp(start)[:, None] * tl.exp(end)[None, :]
            gap += tl.sum(log_decays(log, b, begin, n, kh, T, K), 0)
        if SEGMENTS:
            others = segment_numbers(segments, b, begin, n, T)
            dp = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], dp, 0.0)
        acc = tl.dot(dp.to(key.dtype), key, acc, input_precision=PRECISION)
    before = states + ((b.to(tl.int64) * K + kh) * CHUNKS + c) * E
    state = tl.load(before + e[:, None] + f[None, :] * V, mask=(e < V)[:, None] & (f < F)[None, :], other=0.0)
    read = tl.dot(grad, state, input_precision=PRECISION)
    if WEIGHS:
        keys = tl.load(before + F * V + f, mask=f < F, other=0.0).to(tl.float32)
        read += extra[:, None] * keys[None, :]
    factor = tl.full([BM], 1.0, tl.float32)
    if DECAY:
        factor = tl.exp(start + gap)
    if SEGMENTS:
        factor = tl.where((own == segment_before(segments, b, c, T, CHUNK)) & (own >= 0), factor, 0.0)
    acc += read * factor[:, None]
    store_tokens(d_query, acc, b * VT + vt, first, r, h, f, T, N, F)
    if DECAY:
        store_numbers(flow, tl.sum(acc * query, 1), b * VT + vt, first, r, h, T, N)


def recurrent_key_gradient(
    q, k, v, log, segments, d_states, d_out, d_weight, d_key, d_value, flow, ends,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, WEIGHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_key (B, tiles, T, K, F) and d_value (B, T, K, V): one program a block of keys.

    Also what flows from each key (B, tiles, T, K): `flow` to queries of its chunk, `ends` to the state.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    E: tl.constexpr = F * V + (F if WEIGHS else 0)
    kh, vt, b = tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first = tl.program_id(0) * BN
    c = first // CHUNK
    blocks = (tl.minimum((c + 1) * CHUNK, T) - first - 1) // BN
    n, f, e = tl.arange(0, BN), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    key = tokens_by_features(k, b, first, n, kh, f, T, K, F)
    value = tokens_by_features(v, b, first, n, kh, e, T, K, V)
    dk, dv = tl.zeros([BN, FP], tl.float32), tl.zeros([BN, VB], tl.float32)
    gap = 0.0
    if DECAY:
        end = logs_after(log, b, first, n, kh, T, K, BN)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, n, T)
    for later in tl.static_range(2):  # the block of the keys themselves, then those after it in the chunk
        for m in range(blocks if later else 1):
            begin = first + (m + 1 if later else 0) * BN
            factor = 1.0
            if DECAY:
                logs = log_decays(log, b, begin, n, kh, T, K)
                if later:
                    factor = tl.exp(end + gap)[:, None] * tl.exp(tl.cumsum(logs, 0))[None, :]
                    gap += tl.sum(logs, 0)
                else:
                    factor = tl.exp(logs_between_transposed(logs, n, n))
            if not later:
                factor = tl.where(n[:, None] <= n[None, :], factor, 0.0)
            if SEGMENTS:
                others = segment_numbers(segments, b, begin, n, T)
                factor = tl.where((own[:, None] == others[None, :]) & (own >= 0)[:, None], factor, 0.0)
            for g in range(G):
                query = tokens_by_features(q, b, begin, n, kh * G + g, f, T, N, F)
                grad = tokens_by_features(d_out, b, begin, n, kh * G + g, e, T, N, V)
                p = tl.dot(key, tl.trans(query), input_precision=PRECISION) * factor
                dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
                dp = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
                if WEIGHS:
                    extra = token_numbers(d_weight, b, begin, n, kh * G + g, T, N)
                    dp += tl.where(vt == 0, extra, 0.0)[None, :]
                dk = tl.dot((dp * factor).to(query.dtype), query, dk, input_precision=PRECISION)
    if DECAY:
        store_numbers(flow, tl.sum(dk * key, 1), b * VT + vt, first, n, kh, T, K)
    reached = tl.full([BN], 1.0, tl.float32)
    if DECAY:
        reached = tl.exp(end + gap)
    if SEGMENTS:
        reached = tl.where((own == segment_after(segments, b, c, T, CHUNK)) & (own >= 0), reached, 0.0)
    after = d_states + ((b.to(tl.int64) * K + kh) * CHUNKS + c) * E
    state = tl.load(after + f[:, None] * V + e[None, :], mask=(f < F)[:, None] & (e < V)[None, :], other=0.0)
    dv += tl.dot(key, state, input_precision=PRECISION) * reached[:, None]
    store_tokens(d_value, dv, b, first, n, kh, e, T, K, V)
    state = tl.load(after + e[:, None] + f[None, :] * V, mask=(e < V)[:, None] & (f < F)[None, :], other=0.0)
    written = tl.dot(value, state, input_precision=PRECISION)
    if WEIGHS:
        keys = tl.load(after + F * V + f, mask=f < F, other=0.0).to(tl.float32)
        written += tl.where(vt == 0, keys, 0.0)[None, :]
    written *= reached[:, None]
    if DECAY:
        store_numbers(ends, tl.sum(written * key, 1), b * VT + vt, first, n, kh, T, K)
    store_tokens(d_key, dk + written, b * VT + vt, first, n, kh, f, T, K, F)


def recurrent_decay_gradient(
    log, segments, query_flow, key_flow, ends, totals, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, QUERY_TILES: tl.constexpr, KEY_TILES: tl.constexpr,
    PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """d_log (B, T, K), 0 for padding: one program a chunk and head."""
    K: tl.constexpr = N // G
    c, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, r, part = c * CHUNK, tl.arange(0, CHUNK), tl.arange(0, PARTS_PADDED)
    crossing, end = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for vt in range(QUERY_TILES):
        for g in range(G):
            crossing += token_numbers(query_flow, b * QUERY_TILES + vt, first, r, kh * G + g, T, N)
    for vt in range(KEY_TILES):
        crossing -= token_numbers(key_flow, b * KEY_TILES + vt, first, r, kh, T, K)
        end += token_numbers(ends, b * KEY_TILES + vt, first, r, kh, T, K)
    parts = totals + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * PARTS
    total = tl.sum(tl.load(parts + part, mask=part < PARTS, other=0.0), 0)
    gradient = tl.cumsum(crossing, 0, reverse=True) + (tl.cumsum(end, 0) - end) + total
    follows = token_numbers(log, b, first, r, kh, T, K) > -200.0
    if SEGMENTS:
        follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)
    store_numbers(d_log, tl.where(follows, gradient, 0.0), b, first, r, kh, T, K)
