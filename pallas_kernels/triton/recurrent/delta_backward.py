"""The delta rule, backward; names as in `delta_forward`.

With dS the gradient of the state after a chunk and R = T X::

    Z  = T^T (P^T d_out + e K dS),   dV = beta Z,   dA = -Z R^T,   dP = d_out R^T
    dS = factor dS + (a Q)^T d_out - (a K)^T beta Z

No product here is transposed and multiplied again: Triton below 3.7.1 miscompiles that on Hopper. What is needed in
both orientations is loaded in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.by_feature import count_levels, reads_state
from pallas_kernels.triton.recurrent.delta_forward import (
    factors_of,
    one_of,
    state_factor,
    token_factors,
)
from pallas_kernels.triton.recurrent.functions import (
    chunk_factors,
    features_by_tokens,
    finite_logs,
    log_decays,
    log_halves,
    operand,
    place,
    segment_numbers,
    store_numbers,
    store_tokens,
    summed_tokens,
    token_numbers,
    tokens_by_features,
)


@triton.jit
def value_gradient(
    writing, after, weights, inverse, ends, d_out, b, c, head, r, e,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BY_FEATURE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns of a chunk's Z; `after` holds the same columns of the gradient of the state after the chunk."""
    K: tl.constexpr = N // G
    first = c * CHUNK
    found = tl.dot(writing, after, input_precision=PRECISION)
    if not BY_FEATURE:
        found *= token_factors(ends, b, c, r, head, T, K, CHUNK, SCALED)[:, None]
    for g in range(G):
        weight = tokens_by_features(weights, b, first, r, head * G + g, r, T, N, CHUNK)
        above = tokens_by_features(d_out, b, first, r, head * G + g, e, T, N, V)
        found = tl.dot(weight, above, found, input_precision=PRECISION)
    if not BY_FEATURE:
        solve = tokens_by_features(inverse, b, first, r, head, r, T, K, CHUNK)
        found = tl.dot(solve, operand(found, solve.dtype, PRECISION), input_precision=PRECISION)
    return found


@triton.jit
def gradient_before(
    state, queries, weights, reads, writes, inverse, beta, starts, ends, factors, d_out, b, c, head, r, f, e,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BY_FEATURE: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of a state from after a chunk to before it."""
    K: tl.constexpr = N // G
    first = c * CHUNK
    factor = state_factor(factors, b, c, head, f, T, K, F, CHUNK, BY_FEATURE, SCALED)
    start = token_factors(starts, b, c, r, head, T, K, CHUNK, SCALED)
    writing = tokens_by_features(writes, b, first, r, head, f, T, K, F)
    grad = value_gradient(
        writing, operand(state, writing.dtype, PRECISION), weights, inverse, ends, d_out, b, c, head, r, e, T, N, G, V,
        CHUNK, BY_FEATURE, SCALED, PRECISION,
    )  # fmt: skip
    state *= factor
    for g in range(G):
        query = features_by_tokens(queries, b, first, r, head * G + g, f, T, N, F)
        above = tokens_by_features(d_out, b, first, r, head * G + g, e, T, N, V)
        above = operand(above * start[:, None], above.dtype, PRECISION)
        state = tl.dot(query, above, state, input_precision=PRECISION)
    negative = grad * (-start * token_numbers(beta, b, first, r, head, T, K))[:, None]
    if BY_FEATURE:
        reading = features_by_tokens(reads, b, first, r, head, f, T, K, F)
    else:
        reading = tl.trans(writing)
    negative = operand(negative, reading.dtype, PRECISION)
    return tl.dot(reading, negative, state, input_precision=PRECISION)


def delta_gradient_maps(
    queries, weights, reads, writes, inverse, beta, starts, ends, factors, d_out, added,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BY_FEATURE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
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
            state, queries, weights, reads, writes, inverse, beta, starts, ends, factors, d_out, b, stop - 1 - step,
            kh, r, f, e, T, N, G, F, V, CHUNK, BY_FEATURE, SCALED, PRECISION,
        )  # fmt: skip
    out = added + ((b.to(tl.int64) * K + kh) * SPANS + span) * (F * V)
    tl.store(out + f[:, None] * V + e[None, :], state, mask=(f < F)[:, None] & (e < V)[None, :])


def delta_state_gradient(
    queries, weights, reads, writes, inverse, beta, starts, ends, factors, d_out, d_last, maps, added,
    d_states, d_first,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BY_FEATURE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
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
        after = operand(state, d_states.dtype.element_ty, PRECISION)
        tl.store(d_states + (row * CHUNKS + c) * (F * V) + at, after, mask=there)
        state = gradient_before(
            state, queries, weights, reads, writes, inverse, beta, starts, ends, factors, d_out, b, c, kh, r, f, e,
            T, N, G, F, V, CHUNK, BY_FEATURE, SCALED, PRECISION,
        )  # fmt: skip
    if span == 0:
        tl.store(d_first + row * (F * V) + at, state, mask=there)


@triton.jit
def same_segment(segments, b, first, r, T: tl.constexpr):
    """Whether two tokens of a chunk have the same segment, and not padding."""
    own = segment_numbers(segments, b, first, r, T)
    return (own[:, None] == own[None, :]) & (own >= 0)[None, :]


def delta_pair_gradients(
    weights, writes, inverse, v, beta, log, segments, ends, corrected, d_out, d_states,
    z, d_value, d_strength, d_p, d_a,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z and d_value (B, T, K, V), d_strength Z . V (B, T, K), d_p dP (B, T, N, CHUNK) and d_a dA (B, T, K, CHUNK).

    With DECAY the last two are multiplied by the decay between the two tokens. Above the diagonal they are transposed,
    dA times beta: a row has there what reads its token.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    c, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = c * CHUNK
    r, f = tl.arange(0, CHUNK), tl.arange(0, FP)
    lower = r[:, None] >= r[None, :]
    factor = tl.where(lower, 1.0, 0.0)
    if DECAY:
        logs = log_decays(log, b, first, r, kh, T, K)
        later = tl.where(r[:, None] > r[None, :], logs[:, None], 0.0)
        factor *= tl.exp(summed_tokens(lower, later, PRECISION))
    if SEGMENTS:
        factor = tl.where(same_segment(segments, b, first, r, T), factor, 0.0)
    after = d_states + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    writing = tokens_by_features(writes, b, first, r, kh, f, T, K, F)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    for vt in range(VT):
        e = vt * VB + tl.arange(0, VB)
        there = (f < F)[:, None] & (e < V)[None, :]
        state = tl.load(after + f[:, None] * V + e[None, :], mask=there, other=0.0)
        found = value_gradient(
            writing, state, weights, inverse, ends, d_out, b, c, kh, r, e, T, N, G, V, CHUNK, BY_FEATURE, SCALED,
            PRECISION,
        )  # fmt: skip
        narrow = operand(found, z.dtype.element_ty, PRECISION)
        store_tokens(z, narrow, b, first, r, kh, e, T, K, V)
        store_tokens(d_value, found * strength[:, None], b, first, r, kh, e, T, K, V)
        products += tl.sum(found * tokens_by_features(v, b, first, r, kh, e, T, K, V), 1)
        value = features_by_tokens(corrected, b, first, r, kh, e, T, K, V)
        pairs = tl.dot(narrow, value, pairs, input_precision=PRECISION)
    store_numbers(d_strength, products, b, first, r, kh, T, K)
    earlier = r[:, None] > r[None, :]
    pairs = tl.where(earlier, -pairs * factor, 0.0)
    pairs = operand(pairs + tl.trans(pairs * strength[:, None]), d_a.dtype.element_ty, PRECISION)
    store_tokens(d_a, pairs, b, first, r, kh, r, T, K, CHUNK)
    for g in range(G):
        pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        for vt in range(VT):
            e = vt * VB + tl.arange(0, VB)
            grad = tokens_by_features(d_out, b, first, r, kh * G + g, e, T, N, V)
            value = features_by_tokens(corrected, b, first, r, kh, e, T, K, V)
            pairs = tl.dot(grad, value, pairs, input_precision=PRECISION)
        pairs *= factor
        pairs = operand(pairs + tl.trans(tl.where(earlier, pairs, 0.0)), d_p.dtype.element_ty, PRECISION)
        store_tokens(d_p, pairs, b, first, r, kh * G + g, r, T, N, CHUNK)


@triton.jit
def paired(read, written, pairs, readers, keys, i, j, PRECISION: tl.constexpr):
    """Adds the sums over the keys that each token reads, and over the tokens that read it, with weights `pairs`."""
    read = tl.dot(tl.where(i >= j, pairs, 0.0).to(keys.dtype), keys, read, input_precision=PRECISION)
    written = tl.dot(tl.where(i <= j, pairs, 0.0).to(keys.dtype), readers, written, input_precision=PRECISION)
    return read, written


@triton.jit
def paired_at(level, factor, read, written, pairs, readers, keys, i, j, PRECISION: tl.constexpr):
    """Adds the part of these sums at a level, where the tokens of second blocks read the tokens of first blocks.

    factor: the tokens' decays there.
    """
    second = ((i >> level) & 1) == 1
    met = tl.where(((i >> level) ^ (j >> level)) == 1, 1.0, 0.0).to(keys.dtype)
    other = one_of(second, readers, keys, factor)
    found = factor * tl.dot(pairs * met, other, input_precision=PRECISION)
    return read + tl.where(second, found, 0.0), written + tl.where(second, 0.0, found)


def delta_gradients(
    q, k, beta, log, segments, sums, states, corrected, d_out, d_states, z, d_p, d_a, starts, ends, factors,
    d_query, d_key, d_strength, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, STAGES: tl.constexpr, DECAY: tl.constexpr,
    BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_query (B, T, N, F) and d_key (B, T, K, F): one program FB features of a chunk.

    d_strength (B, tiles of features, T, K) has its part of beta's gradient, without Z . V. d_log (B, T, K, F) is
    BY_FEATURE, and else (B, tiles of features, T, K).
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    FT: tl.constexpr = (F + FB - 1) // FB
    K: tl.constexpr = N // G
    c, kh, ft, b = tl.program_id(0), tl.program_id(1) // FT, tl.program_id(1) % FT, tl.program_id(2)
    first = c * CHUNK
    r, f = tl.arange(0, CHUNK), ft * FB + tl.arange(0, FB)
    i, j = r[:, None], r[None, :]
    levels = count_levels(first, T, CHUNK)
    at = ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    # The keys that read the state, and what is written to it.
    reader, written = tl.zeros([CHUNK, FB], tl.float32), tl.zeros([CHUNK, FB], tl.float32)
    total = tl.zeros([FB], tl.float32)
    for vt in tl.range(VT, num_stages=1):
        e = vt * VB + tl.arange(0, VB)
        spot, there = e[:, None] + f[None, :] * V, (e < V)[:, None] & (f < F)[None, :]
        before = tl.load(states + at + spot, mask=there, other=0.0)
        after = tl.load(d_states + at + spot, mask=there, other=0.0)
        grad = tokens_by_features(z, b, first, r, kh, e, T, K, V)
        value = tokens_by_features(corrected, b, first, r, kh, e, T, K, V)
        reader = tl.dot(grad, before, reader, input_precision=PRECISION)
        written = tl.dot(value, after, written, input_precision=PRECISION)
        total += tl.sum(before.to(tl.float32) * after, 0)
    if BY_FEATURE:
        logs = finite_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
        high, low = log_halves(logs, PRECISION)
        start = factors_of(sums, LEVELS + 1, high, low, r, PRECISION)
        end = factors_of(sums, LEVELS, high, low, r, PRECISION)
        if SEGMENTS:
            own = segment_numbers(segments, b, first, r, T)
            start = tl.where(reads_state(segments, own, b, c, T, CHUNK, False)[:, None], start, 0.0)
            end = tl.where(reads_state(segments, own, b, c, T, CHUNK, True)[:, None], end, 0.0)
    else:
        start = token_factors(starts, b, c, r, kh, T, K, CHUNK, SCALED)[:, None]
        end = token_factors(ends, b, c, r, kh, T, K, CHUNK, SCALED)[:, None]
    reader *= -start
    written *= end
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    ends_total = tl.sum((written.to(key.dtype) * key).to(tl.float32), 0)
    if not BY_FEATURE:
        pairs = tokens_by_features(d_a, b, first, r, kh, r, T, K, CHUNK)
        reader, written = paired(reader, written, pairs, key, key, i, j, PRECISION)
    flows = tl.zeros([CHUNK, FB], tl.float32)
    for g in range(G):
        h = kh * G + g
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        near = tl.zeros([CHUNK, FB], tl.float32)
        for vt in tl.range(VT, num_stages=1):
            e = vt * VB + tl.arange(0, VB)
            spot, there = e[:, None] + f[None, :] * V, (e < V)[:, None] & (f < F)[None, :]
            before = tl.load(states + at + spot, mask=there, other=0.0)
            grad = tokens_by_features(d_out, b, first, r, h, e, T, N, V)
            near = tl.dot(grad, before, near, input_precision=PRECISION)
        near *= start
        if BY_FEATURE:
            for level in tl.range(levels, num_stages=STAGES):
                factor = factors_of(sums, level, high, low, r, PRECISION)
                pairs = tokens_by_features(d_p, b, first, r, h, r, T, N, CHUNK)
                near, written = paired_at(level, factor, near, written, pairs, query, key, i, j, PRECISION)
                if g == 0:
                    pairs = tokens_by_features(d_a, b, first, r, kh, r, T, K, CHUNK)
                    reader, written = paired_at(
                        level, factor, reader, written, pairs, key, key, i, j, PRECISION
                    )
            itself = d_p + place(b, first, h, T, N, CHUNK) + r * (N * CHUNK + 1)
            diagonal = tl.load(itself, mask=first + r < T, other=0.0).to(tl.float32)[:, None]
            near += diagonal * key
            written += diagonal * query
        else:
            pairs = tokens_by_features(d_p, b, first, r, h, r, T, N, CHUNK)
            near, written = paired(near, written, pairs, query, key, i, j, PRECISION)
        flows += query * near
        store_tokens(d_query, near, b, first, r, h, f, T, N, F)
    store_numbers(d_strength, tl.sum(reader * key, 1), b * FT + ft, first, r, kh, T, K)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    reader *= strength[:, None]
    flows += (reader - written) * key
    store_tokens(d_key, reader + written, b, first, r, kh, f, T, K, F)
    # What decays from a token to the chunk's end passes all later tokens, and so does what was there before the chunk.
    if BY_FEATURE:
        total = total * chunk_factors(factors, b, c, kh, f, T, K, F, CHUNK) + ends_total
        gradient = tl.cumsum(flows, 0, reverse=True) + total[None, :]
        follows = tokens_by_features(log, b, first, r, kh, f, T, K, F) > -200.0
        if SEGMENTS:
            follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)[:, None]
        store_tokens(d_log, tl.where(follows, gradient, 0.0), b, first, r, kh, f, T, K, F)
    elif DECAY:
        total = total * state_factor(factors, b, c, kh, f, T, K, F, CHUNK, BY_FEATURE, SCALED) + ends_total
        gradient = tl.cumsum(tl.sum(flows, 1), 0, reverse=True) + tl.sum(total, 0)
        follows = token_numbers(log, b, first, r, kh, T, K) > -200.0
        if SEGMENTS:
            follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)
        store_numbers(d_log, tl.where(follows, gradient, 0.0), b * FT + ft, first, r, kh, T, K)
