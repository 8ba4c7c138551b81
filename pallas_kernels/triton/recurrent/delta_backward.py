"""The delta rule, backward; names as in `delta_forward`.

With dS the gradient of the state after a chunk, R = T diag(beta) (V - a K S) gives::

    dR = tril(Q K^T * D)^T d_out + e K dS
    Z = T^T dR
    d(diag(beta) V) = Z,  d(diag(beta) a K) = -Z S^T,  dA = -strictly lower part of Z R^T
    dS = total dS + (a Q)^T d_out - W^T dR

A is the matrix whose unit lower inverse is T. No product here is transposed and multiplied again: Triton below 3.7.1
miscompiles that on Hopper. What is needed in both orientations is loaded or computed in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.delta_forward import end_factors, pair_factors, start_factors
from pallas_kernels.triton.recurrent.functions import (
    chunk_factor,
    chunk_factors,
    features_by_tokens,
    log_decays,
    logs_between_transposed,
    segment_numbers,
    store_numbers,
    store_tokens,
    token_numbers,
    tokens_by_features,
)


@triton.jit
def transposed_pair_factors(
    log, segments, b, c, rows, head, T: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """How much the token of each column reads of what the token of each row wrote."""
    factor = tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0)
    if DECAY:
        factor *= tl.exp(logs_between_transposed(log_decays(log, b, c * CHUNK, rows, head, T, K), rows, rows))
    if SEGMENTS:
        own = segment_numbers(segments, b, c * CHUNK, rows, T)
        factor = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], factor, 0.0)
    return factor


def delta_local_gradient(
    q, k, log, segments, d_out, d_corrected,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_corrected (B, T, K, V): the part of dR that comes from the chunk's own outputs."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    c, kh, vt, b = tl.program_id(0), tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first = c * CHUNK
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    factor = transposed_pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    acc = tl.zeros([CHUNK, VB], tl.float32)
    for g in range(G):
        query = tokens_by_features(q, b, first, r, kh * G + g, f, T, N, F)
        grad = tokens_by_features(d_out, b, first, r, kh * G + g, e, T, N, V)
        p = tl.dot(key, tl.trans(query), input_precision=PRECISION) * factor
        acc = tl.dot(p.to(grad.dtype), grad, acc, input_precision=PRECISION)
    store_tokens(d_corrected, acc, b, first, r, kh, e, T, K, V)


@triton.jit
def gradient_before(
    state, q, k, w, log, segments, beta, factors, d_out, d_corrected, b, c, head, r, f, e,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of a state from after a chunk to before it.

    BY_FEATURE, q, k, w and d_corrected are the queries, writes, reads and weights of `delta_by_feature`.
    """
    K: tl.constexpr = N // G
    first = c * CHUNK
    key = tokens_by_features(k, b, first, r, head, f, T, K, F)
    reading = features_by_tokens(w, b, first, r, head, f, T, K, F)
    through = tl.dot(key, state.to(key.dtype), input_precision=PRECISION)
    if BY_FEATURE:
        grad = tl.zeros_like(through)
        state *= chunk_factors(factors, b, c, head, f, T, K, F, CHUNK)[:, None]
    else:
        grad = tokens_by_features(d_corrected, b, first, r, head, e, T, K, V)
    if (DECAY or SEGMENTS) and not BY_FEATURE:
        through *= end_factors(log, segments, b, c, r, head, T, K, CHUNK, DECAY, SEGMENTS)[:, None]
        start = start_factors(log, segments, b, c, r, head, T, K, CHUNK, DECAY, SEGMENTS)
        state *= chunk_factor(log, segments, b, c, head, T, K, CHUNK, DECAY, SEGMENTS)
    for g in range(G):
        query = features_by_tokens(q, b, first, r, head * G + g, f, T, N, F)
        above = tokens_by_features(d_out, b, first, r, head * G + g, e, T, N, V)
        if BY_FEATURE:
            weight = features_by_tokens(d_corrected, b, first, r, head * G + g, r, T, N, CHUNK)
            grad = tl.dot(weight, above, grad, input_precision=PRECISION)
        elif DECAY or SEGMENTS:
            above = (above * start[:, None]).to(above.dtype)
        state = tl.dot(query, above, state, input_precision=PRECISION)
    negative = -(grad + through)
    if BY_FEATURE:
        negative *= token_numbers(beta, b, first, r, head, T, K)[:, None]
    negative = negative.to(reading.dtype)
    return tl.dot(reading, negative, state, input_precision=PRECISION)


def delta_gradient_maps(
    q, k, w, log, segments, beta, factors, d_out, d_corrected, added,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, DECAY: tl.constexpr,
    BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """added (B, K, SPANS, F, V): a span maps the gradient G of its last state to A^T G + added."""
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    K: tl.constexpr = N // G
    kh, span, b = tl.program_id(1) // SPANS, tl.program_id(1) % SPANS, tl.program_id(2)
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), tl.program_id(0) * VB + tl.arange(0, VB)
    state = tl.zeros([FP, VB], tl.float32)
    stop = tl.minimum((span + 1) * SPAN, CHUNKS)
    for step in range(stop - span * SPAN):
        state = gradient_before(
            state, q, k, w, log, segments, beta, factors, d_out, d_corrected, b, stop - 1 - step, kh, r, f, e, T, N,
            G, F, V, CHUNK, DECAY, BY_FEATURE, SEGMENTS, PRECISION,
        )  # fmt: skip
    out = added + ((b.to(tl.int64) * K + kh) * SPANS + span) * (F * V)
    tl.store(out + f[:, None] * V + e[None, :], state, mask=(f < F)[:, None] & (e < V)[None, :])


def delta_state_gradient(
    q, k, w, log, segments, beta, factors, d_out, d_corrected, d_last, maps, added, d_states, d_first,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, DECAY: tl.constexpr,
    BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_states (B, K, chunks, F, V) and d_first (B, K, F, V): gradients of the states after chunks and of the first."""
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    K: tl.constexpr = N // G
    kh, span, b = tl.program_id(1) // SPANS, tl.program_id(1) % SPANS, tl.program_id(2)
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), tl.program_id(0) * VB + tl.arange(0, VB)
    at, there = f[:, None] * V + e[None, :], (f < F)[:, None] & (e < V)[None, :]
    row = b.to(tl.int64) * K + kh
    state = tl.load(d_last + row * (F * V) + at, mask=there, other=0.0)
    if SPANS > 1:
        square = (f < F)[:, None] & (f < F)[None, :]
        for step in tl.range(0, SPANS - 1 - span, num_stages=1):
            later = row * SPANS + SPANS - 1 - step
            begin = maps + later * (F * (F + V))
            change = tl.load(begin + f[:, None] + f[None, :] * (F + V), mask=square, other=0.0)
            more = tl.load(added + later * (F * V) + at, mask=there, other=0.0)
            state = tl.dot(change, state, more, input_precision=PRECISION)
    stop = tl.minimum((span + 1) * SPAN, CHUNKS)
    for step in range(stop - span * SPAN):
        c = stop - 1 - step
        tl.store(
            d_states + (row * CHUNKS + c) * (F * V) + at, state.to(d_states.dtype.element_ty), mask=there
        )
        state = gradient_before(
            state, q, k, w, log, segments, beta, factors, d_out, d_corrected, b, c, kh, r, f, e, T, N, G, F, V,
            CHUNK, DECAY, BY_FEATURE, SEGMENTS, PRECISION,
        )  # fmt: skip
    if span == 0:
        tl.store(d_first + row * (F * V) + at, state, mask=there)


def delta_value_gradient(
    k, beta, log, segments, inverse, d_corrected, d_states, d_value, z,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_value and z (B, T, K, V)."""
    VT: tl.constexpr = (V + VB - 1) // VB
    c, kh, vt, b = tl.program_id(0), tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first = c * CHUNK
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    after = d_states + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    state = tl.load(after + f[:, None] * V + e[None, :], mask=(f < F)[:, None] & (e < V)[None, :], other=0.0)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    grad = tl.dot(key, state, input_precision=PRECISION)
    if DECAY or SEGMENTS:
        grad *= end_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)[:, None]
    grad += tokens_by_features(d_corrected, b, first, r, kh, e, T, K, V)
    transposed = features_by_tokens(inverse, b, first, r, kh, r, T, K, CHUNK)
    found = tl.dot(transposed, grad.to(key.dtype), input_precision=PRECISION)
    store_tokens(z, found, b, first, r, kh, e, T, K, V)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    store_tokens(d_value, found * strength[:, None], b, first, r, kh, e, T, K, V)


def delta_query_gradient(
    q, k, log, segments, states, corrected, d_out, d_query, flow,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_query (B, T, N, F), and flow (B, T, N): what flows from the state to each query."""
    K: tl.constexpr = N // G
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, kh = c * CHUNK, h // G
    r, f = tl.arange(0, CHUNK), tl.arange(0, FP)
    before = states + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, FP], tl.float32)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        grad = tokens_by_features(d_out, b, first, r, h, e, T, N, V)
        value = features_by_tokens(corrected, b, first, r, kh, e, T, K, V)
        dp = tl.dot(grad, value, dp, input_precision=PRECISION)
        state = tl.load(
            before + e[:, None] + f[None, :] * V, mask=(e < V)[:, None] & (f < F)[None, :], other=0.0
        )
        acc = tl.dot(grad, state, acc, input_precision=PRECISION)
    if DECAY or SEGMENTS:
        acc *= start_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)[:, None]
    if DECAY:
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        store_numbers(flow, tl.sum(acc * query, 1), b, first, r, h, T, N)
    dp *= pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    acc = tl.dot(dp.to(key.dtype), key, acc, input_precision=PRECISION)
    store_tokens(d_query, acc, b, first, r, h, f, T, N, F)


def delta_key_gradient(
    q, k, v, beta, log, segments, states, corrected, d_out, d_states, z, query_flow, d_key, d_beta, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_key (B, T, K, F), d_beta and d_log (B, T, K)."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    c, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = c * CHUNK
    r, f = tl.arange(0, CHUNK), tl.arange(0, FP)
    at = ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    # d of A, and of A transposed; of the keys that read the state, and of those that are written to it.
    lower, upper = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    reads, writes = tl.zeros([CHUNK, FP], tl.float32), tl.zeros([CHUNK, FP], tl.float32)
    d_strength = tl.zeros([CHUNK], tl.float32)
    total = 0.0
    for vt in range(VT):
        e = vt * VB + tl.arange(0, VB)
        place, there = e[:, None] + f[None, :] * V, (e < V)[:, None] & (f < F)[None, :]
        before = tl.load(states + at + place, mask=there, other=0.0)
        after = tl.load(d_states + at + place, mask=there, other=0.0)
        grad = tokens_by_features(z, b, first, r, kh, e, T, K, V)
        value = tokens_by_features(corrected, b, first, r, kh, e, T, K, V)
        lower = tl.dot(grad, tl.trans(value), lower, input_precision=PRECISION)
        upper = tl.dot(value, tl.trans(grad), upper, input_precision=PRECISION)
        reads = tl.dot(grad, before, reads, input_precision=PRECISION)
        writes = tl.dot(value, after, writes, input_precision=PRECISION)
        plain = tokens_by_features(v, b, first, r, kh, e, T, K, V)
        d_strength += tl.sum(grad.to(tl.float32) * plain, 1)
        if DECAY:
            total += tl.sum(before.to(tl.float32) * after)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    # The keys that read the state.
    start = start_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    from_state = -start * tl.sum(reads * key, 1)
    d_strength += from_state
    flows = strength * from_state
    acc = -(start * strength)[:, None] * reads
    # The keys that write to it.
    end = end_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    ends = end * tl.sum(writes * key, 1)
    acc += end[:, None] * writes
    # The pairs of A.
    overlap = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    pairs = pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    lower = tl.where(r[:, None] > r[None, :], -lower * pairs, 0.0)
    by_reader = tl.sum(lower * overlap, 1)
    d_strength += by_reader
    factor = transposed_pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    upper = tl.where(r[:, None] < r[None, :], -upper * factor * strength[None, :], 0.0)
    flows += strength * by_reader - tl.sum(upper * overlap, 1)
    both = lower * strength[:, None] + upper
    acc = tl.dot(both.to(key.dtype), key, acc, input_precision=PRECISION)
    # The pairs of queries and keys.
    for g in range(G):
        h = kh * G + g
        dp = tl.zeros([CHUNK, CHUNK], tl.float32)
        for vt in range(VT):
            e = vt * VB + tl.arange(0, VB)
            value = tokens_by_features(corrected, b, first, r, kh, e, T, K, V)
            grad = features_by_tokens(d_out, b, first, r, h, e, T, N, V)
            dp = tl.dot(value, grad, dp, input_precision=PRECISION)
        dp *= factor
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        if DECAY:
            flow = dp * tl.dot(key, tl.trans(query), input_precision=PRECISION)
            flows += tl.sum(flow, 0) - tl.sum(flow, 1)
            flows += token_numbers(query_flow, b, first, r, h, T, N)
        acc = tl.dot(dp.to(query.dtype), query, acc, input_precision=PRECISION)
    store_tokens(d_key, acc, b, first, r, kh, f, T, K, F)
    store_numbers(d_beta, d_strength, b, first, r, kh, T, K)
    if DECAY:
        total *= chunk_factor(log, segments, b, c, kh, T, K, CHUNK, DECAY, SEGMENTS)
        gradient = tl.cumsum(flows, 0, reverse=True) + (tl.cumsum(ends, 0) - ends) + total
        follows = token_numbers(log, b, first, r, kh, T, K) > -200.0
        if SEGMENTS:
            follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)
        store_numbers(d_log, tl.where(follows, gradient, 0.0), b, first, r, kh, T, K)
