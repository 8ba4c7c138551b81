"""Sums of outer products, forward: what each chunk adds to the state, the states before all chunks, and the outputs.

An array of states is (B, K, chunks, E). E numbers are the F x V products of keys and values, and behind them, where
weights are summed, the F sums of the keys.
"""

from __future__ import annotations

import triton.language as tl

from pallas_kernels.triton.recurrent.functions import (
    chunk_factor,
    features_by_tokens,
    finite_logs,
    log_decays,
    logs_after,
    logs_between,
    segment_after,
    segment_before,
    segment_numbers,
    store_numbers,
    store_tokens,
    summed_features,
    token_numbers,
    tokens_by_features,
)


def recurrent_sums(
    x, y, log, segments, weights, sums, factors,
    T: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    V: tl.constexpr, VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr,
    BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, WEIGHS: tl.constexpr, READS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of x y^T over the tokens of each chunk; with a decay BY_FEATURE also its factors (B, K, chunks, F).

    Forward, x and y are keys and values, weighted by the decay from each token to the chunk's end. Backward (READS),
    they are queries and the outputs' gradients, over all heads of a group, weighted by the decay from the chunk's
    beginning, and `weights` are the gradients of the sums of weights.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = HEADS // G
    BLOCKS: tl.constexpr = CHUNK // BN
    E: tl.constexpr = F * V + (F if WEIGHS else 0)
    c, kh, vt, b = tl.program_id(0), tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    r, f, e = tl.arange(0, BN), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    total = tl.zeros([FP, VB], tl.float32)
    summed = tl.zeros([FP], tl.float32)
    if SEGMENTS:
        if READS:
            segment = segment_before(segments, b, c, T, CHUNK)
        else:
            segment = segment_after(segments, b, c, T, CHUNK)
    gaps = tl.zeros([FP], tl.float32)
    for g in range(G):
        gap = 0.0
        gaps = tl.zeros([FP], tl.float32)
        for m in range(BLOCKS):
            if READS:
                first = c * CHUNK + m * BN
            else:
                first = c * CHUNK + (BLOCKS - 1 - m) * BN
            left = features_by_tokens(x, b, first, r, kh * G + g, f, T, HEADS, F)
            right = tokens_by_features(y, b, first, r, kh * G + g, e, T, HEADS, V)
            if DECAY:
                logs = log_decays(log, b, first, r, kh, T, K)
                if READS:
                    factor = tl.exp(tl.cumsum(logs, 0) + gap)
                else:
                    factor = tl.exp(logs_after(log, b, first, r, kh, T, K, BN) + gap)
                gap += tl.sum(logs, 0)
            else:
                factor = tl.full([BN], 1.0, tl.float32)
            if BY_FEATURE:
                logs = finite_logs(features_by_tokens(log, b, first, r, kh, f, T, K, F))
                which = r[:, None] <= r[None, :] if READS else r[:, None] > r[None, :]
                left = (left * tl.exp(summed_features(logs, which, PRECISION) + gaps[:, None])).to(left.dtype)
                gaps += tl.sum(logs, 1)
            if SEGMENTS:
                own = segment_numbers(segments, b, first, r, T)
                factor = tl.where((own == segment) & (own >= 0), factor, 0.0)
            if DECAY or SEGMENTS:
                left = (left * factor[None, :]).to(left.dtype)
            if WEIGHS:
                if READS:
                    weight = token_numbers(weights, b, first, r, kh * G + g, T, HEADS)
                    summed += tl.sum(left * weight[None, :], 1)
                else:
                    summed += tl.sum(left.to(tl.float32), 1)
            total = tl.dot(left, right, total, input_precision=PRECISION)
    out = sums + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * E
    tl.store(out + f[:, None] * V + e[None, :], total, mask=(f < F)[:, None] & (e < V)[None, :])
    if WEIGHS:  # noqa: SIM102
        if vt == 0:
            tl.store(out + F * V + f, summed, mask=f < F)
    if BY_FEATURE:  # noqa: SIM102
        if vt == 0:
            kept = chunk_factor(log, segments, b, c, kh, T, K, CHUNK, False, SEGMENTS)
            at = factors + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * F
            tl.store(at + f, tl.exp(gaps) * kept, mask=f < F)


def recurrent_scan(
    sums, log, segments, first_key_value, first_key, before, states, last_key_value, last_key, decay_gradients,
    T: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, WEIGHS: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """The states before all chunks and after the last, from what the chunks add; one program a part of a state.

    Backward, the gradients of the states after all chunks and of the first state. `before` has the states before the
    chunks. With them each program also computes its part of the gradients of the chunks' decays.
    """
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    part, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = part * BLOCK + tl.arange(0, BLOCK)
    row = b.to(tl.int64) * K + kh
    is_key_value, is_key = at < SIZE, (at >= SIZE) & (at < E)
    state = tl.load(first_key_value + row * SIZE + at, mask=is_key_value, other=0.0)
    if WEIGHS:
        state += tl.load(first_key + row * (E - SIZE) + at - SIZE, mask=is_key, other=0.0)
    for step in tl.range(0, CHUNKS, num_stages=STAGES):
        c = CHUNKS - 1 - step if BACKWARD else step
        place = (row * CHUNKS + c) * E
        added = tl.load(sums + place + at, mask=at < E, other=0.0)
        factor = chunk_factor(log, segments, b, c, kh, T, K, CHUNK, DECAY, SEGMENTS)
        tl.store(states + place + at, state.to(states.dtype.element_ty), mask=at < E)
        if BACKWARD and DECAY:
            earlier = tl.load(before + place + at, mask=at < E, other=0.0).to(tl.float32)
            gradient = tl.sum(tl.where(at < E, state * earlier, 0.0), 0) * factor
            tl.store(decay_gradients + (row * CHUNKS + c) * tl.num_programs(0) + part, gradient)
        state = state * factor + added
    tl.store(last_key_value + row * SIZE + at, state, mask=is_key_value)
    if WEIGHS:
        tl.store(last_key + row * (E - SIZE) + at - SIZE, state, mask=is_key)


def recurrent_outputs(
    q, k, v, log, segments, states, out, weight,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, WEIGHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, T, N, V), and weight (B, T, N): one program a block of queries, from the state and the chunk's keys."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    E: tl.constexpr = F * V + (F if WEIGHS else 0)
    h, vt, b = tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first, kh = tl.program_id(0) * BM, h // G
    c = first // CHUNK
    r, n, f, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    query = tokens_by_features(q, b, first, r, h, f, T, N, F)
    acc = tl.zeros([BM, VB], tl.float32)
    summed = tl.zeros([BM], tl.float32)
    gap = 0.0
    if DECAY:
        logs = log_decays(log, b, first, r, kh, T, K)
        start = tl.cumsum(logs, 0)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
    for j in tl.static_range(BM // BN):
        key = tokens_by_features(k, b, first + j * BN, n, kh, f, T, K, F)
        value = tokens_by_features(v, b, first + j * BN, n, kh, e, T, K, V)
        p = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        seen = r[:, None] >= j * BN + n[None, :]
        if DECAY:
            p *= tl.exp(logs_between(logs, r, j * BN + n))
        if SEGMENTS:
            others = segment_numbers(segments, b, first + j * BN, n, T)
            seen = seen & (own[:, None] == others[None, :]) & (others >= 0)[None, :]
        p = tl.where(seen, p, 0.0)
        if WEIGHS:
            summed += tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    for m in range((first - c * CHUNK) // BN):
        begin = first - (m + 1) * BN
        key = tokens_by_features(k, b, begin, n, kh, f, T, K, F)
        value = tokens_by_features(v, b, begin, n, kh, e, T, K, V)
        p = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if DECAY:
            end = logs_after(log, b, begin, n, kh, T, K, BN) + gap
            p *= tl.exp(start)[:, None] * tl.exp(end)[None, :]
            gap += tl.sum(log_decays(log, b, begin, n, kh, T, K), 0)
        if SEGMENTS:
            others = segment_numbers(segments, b, begin, n, T)
            p = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], p, 0.0)
        if WEIGHS:
            summed += tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    before = states + ((b.to(tl.int64) * K + kh) * CHUNKS + c) * E
    state = tl.load(before + f[:, None] * V + e[None, :], mask=(f < F)[:, None] & (e < V)[None, :], other=0.0)
    read = tl.dot(query, state, input_precision=PRECISION)
    factor = tl.full([BM], 1.0, tl.float32)
    if DECAY:
        factor = tl.exp(start + gap)
    if SEGMENTS:
        factor = tl.where((own == segment_before(segments, b, c, T, CHUNK)) & (own >= 0), factor, 0.0)
    acc += read * factor[:, None]
    store_tokens(out, acc, b, first, r, h, e, T, N, V)
    if WEIGHS:  # noqa: SIM102
        if vt == 0:
            keys = tl.load(before + F * V + f, mask=f < F, other=0.0).to(tl.float32)
            summed += tl.sum(query * keys[None, :], 1) * factor
            store_numbers(weight, summed, b, first, r, h, T, N)
