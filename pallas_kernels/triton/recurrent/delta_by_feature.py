"""The delta rule whose state has one decay for each feature of the keys (Kimi delta attention, arXiv:2510.26692).

In a chunk, each feature decays by a from the beginning to a token, by e from a token to the end, and by D between two
tokens. A is the strictly lower part of the products of keys with keys, weighted by D, its rows times beta. P is the
lower part of the same products of queries with keys. With T = (I + A)^-1::

    X   = beta (V - (a K) S)
    out = (a Q) S + (P T) X
    S   = factor S + (T^T (e K))^T X

One kernel computes a Q, a K, P T and T^T (e K) for all chunks at once and puts zeros where segments differ. The kernels
that walk the chunks therefore need neither decays nor segments, only the chunks' factors. Backward, with dS the
gradient of the state after a chunk and R = T X::

    Z  = (P T)^T d_out + T^T (e K) dS,   dV = beta Z,   dA = -Z R^T,   dP = d_out R^T
    dS = factor dS + (a Q)^T d_out - (a K)^T beta Z

As in `by_feature`, every exponent is a sum of logarithms between two tokens, hence at most 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.by_feature import count_levels, reads_state, until_middle
from pallas_kernels.triton.recurrent.delta_forward import first_of_span, unit_triangular_inverse
from pallas_kernels.triton.recurrent.functions import (
    chunk_factor,
    chunk_factors,
    feature_logs,
    features_by_tokens,
    segment_numbers,
    store_numbers,
    store_tokens,
    summed_features,
    summed_tokens,
    token_numbers,
    tokens_by_features,
)


@triton.jit
def same_segment(segments, b, first, r, T: tl.constexpr):
    """Whether two tokens of a chunk have the same segment, and not padding."""
    own = segment_numbers(segments, b, first, r, T)
    return (own[:, None] == own[None, :]) & (own >= 0)[None, :]


def feature_delta_chunks(
    q, k, beta, log, segments, queries, weights, reads, writes, factors, inverse,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """queries a Q (B, T, N, F), weights P T (B, T, N, CHUNK), reads a K and writes T^T (e K) (B, T, K, F), factors
    (B, K, chunks, F), and inverse T (B, T, K, CHUNK)."""
    K: tl.constexpr = N // G
    FT: tl.constexpr = (F + FB - 1) // FB
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, kh = c * CHUNK, h // G
    r = tl.arange(0, CHUNK)
    i, j = r[:, None], r[None, :]
    # Products with D of queries and keys, and of keys and keys.
    p, overlap = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for ft in range(FT):
        f = ft * FB + tl.arange(0, FB)
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
        column = features_by_tokens(k, b, first, r, kh, f, T, K, F)
        logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
        column_logs = feature_logs(features_by_tokens(log, b, first, r, kh, f, T, K, F))
        p += tl.where(i == j, tl.sum(query.to(tl.float32) * key, 1)[:, None], 0.0)
        for level in range(count_levels(first, T, CHUNK)):
            factor = tl.exp(summed_tokens(until_middle(i, j, level), logs, PRECISION))
            there = column * tl.exp(summed_features(column_logs, until_middle(j, i, level), PRECISION))
            there = there.to(key.dtype)
            met = ((i >> level) ^ (j >> level)) == 1
            found = tl.dot((query * factor).to(key.dtype), there, input_precision=PRECISION)
            p += tl.where(met, found, 0.0)
            found = tl.dot((key * factor).to(key.dtype), there, input_precision=PRECISION)
            overlap += tl.where(met, found, 0.0)
    p = tl.where(i >= j, p, 0.0)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
        same = same_segment(segments, b, first, r, T)
        p, overlap = tl.where(same, p, 0.0), tl.where(same, overlap, 0.0)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    # T, then T transposed: a product's result must not be transposed into another product.
    found = tl.zeros([CHUNK, CHUNK], q.dtype.element_ty)
    for transposed in range(2):
        lower, upper = overlap * strength[:, None], overlap * strength[None, :]
        triangle = tl.where(transposed == 0, tl.where(i > j, lower, 0.0), tl.where(i < j, upper, 0.0))
        found = unit_triangular_inverse(triangle, r, CHUNK, PRECISION).to(found.dtype)
        if transposed == 0:
            weight = tl.dot(p.to(found.dtype), found, input_precision=PRECISION)
            store_tokens(weights, weight, b, first, r, h, r, T, N, CHUNK)
            if h % G == 0:
                store_tokens(inverse, found, b, first, r, kh, r, T, K, CHUNK)
    kept = chunk_factor(log, segments, b, c, kh, T, K, CHUNK, False, SEGMENTS)
    for ft in range(FT):
        f = ft * FB + tl.arange(0, FB)
        logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
        start = tl.exp(summed_tokens(j <= i, logs, PRECISION))
        if SEGMENTS:
            start = tl.where(reads_state(segments, own, b, c, T, CHUNK, False)[:, None], start, 0.0)
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        store_tokens(queries, query * start, b, first, r, h, f, T, N, F)
        if h % G == 0:
            key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
            store_tokens(reads, key * start, b, first, r, kh, f, T, K, F)
            end = tl.exp(summed_tokens(j > i, logs, PRECISION))
            if SEGMENTS:
                end = tl.where(reads_state(segments, own, b, c, T, CHUNK, True)[:, None], end, 0.0)
            written = tl.dot(found, (key * end).to(key.dtype), input_precision=PRECISION)
            store_tokens(writes, written, b, first, r, kh, f, T, K, F)
            at = factors + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * F
            tl.store(at + f, tl.exp(tl.sum(logs, 0)) * kept, mask=f < F)


def feature_delta_outputs(
    queries, weights, reads, writes, v, beta, factors, inverse, first_state, maps, out, last_state, states, corrected,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, T, N, V) and the last state: one program some columns of a span's states, which it walks.

    Where KEEP also states (B, K, chunks, F, V), those before each chunk, and corrected R (B, T, K, V).
    """
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    K: tl.constexpr = N // G
    kh, span, b = tl.program_id(1) // SPANS, tl.program_id(1) % SPANS, tl.program_id(2)
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), tl.program_id(0) * VB + tl.arange(0, VB)
    at, there = f[:, None] * V + e[None, :], (f < F)[:, None] & (e < V)[None, :]
    row = b.to(tl.int64) * K + kh
    state = first_of_span(first_state, maps, row, span, f, e, F, V, SPANS, PRECISION)
    for c in range(span * SPAN, tl.minimum((span + 1) * SPAN, CHUNKS)):
        first = c * CHUNK
        before = state.to(v.dtype.element_ty)
        reading = tokens_by_features(reads, b, first, r, kh, f, T, K, F)
        new = tokens_by_features(v, b, first, r, kh, e, T, K, V)
        new = new - tl.dot(reading, before, input_precision=PRECISION)
        new = (new * token_numbers(beta, b, first, r, kh, T, K)[:, None]).to(before.dtype)
        for g in range(G):
            query = tokens_by_features(queries, b, first, r, kh * G + g, f, T, N, F)
            weight = tokens_by_features(weights, b, first, r, kh * G + g, r, T, N, CHUNK)
            total = tl.dot(query, before, input_precision=PRECISION)
            total = tl.dot(weight, new, total, input_precision=PRECISION)
            store_tokens(out, total, b, first, r, kh * G + g, e, T, N, V)
        if KEEP:
            tl.store(states + (row * CHUNKS + c) * (F * V) + at, before, mask=there)
            found = tokens_by_features(inverse, b, first, r, kh, r, T, K, CHUNK)
            found = tl.dot(found, new, input_precision=PRECISION)
            store_tokens(corrected, found, b, first, r, kh, e, T, K, V)
        writing = features_by_tokens(writes, b, first, r, kh, f, T, K, F)
        state *= chunk_factors(factors, b, c, kh, f, T, K, F, CHUNK)[:, None]
        state = tl.dot(writing, new, state, input_precision=PRECISION)
    if span == SPANS - 1:
        tl.store(last_state + row * (F * V) + at, state, mask=there)


def feature_delta_pair_gradients(
    weights, writes, v, beta, segments, corrected, d_out, d_states, z, d_value, d_strength, d_p, d_a,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z and d_value (B, T, K, V), d_strength Z . V (B, T, K), d_p dP (B, T, N, CHUNK) and d_a dA (B, T, K, CHUNK)."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    c, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = c * CHUNK
    r, f = tl.arange(0, CHUNK), tl.arange(0, FP)
    seen = r[:, None] >= r[None, :]
    if SEGMENTS:
        seen = seen & same_segment(segments, b, first, r, T)
    after = d_states + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    writing = tokens_by_features(writes, b, first, r, kh, f, T, K, F)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    for vt in range(VT):
        e = vt * VB + tl.arange(0, VB)
        there = (f < F)[:, None] & (e < V)[None, :]
        state = tl.load(after + f[:, None] * V + e[None, :], mask=there, other=0.0)
        found = tl.dot(writing, state, input_precision=PRECISION)
        for g in range(G):
            weight = features_by_tokens(weights, b, first, r, kh * G + g, r, T, N, CHUNK)
            grad = tokens_by_features(d_out, b, first, r, kh * G + g, e, T, N, V)
            found = tl.dot(weight, grad, found, input_precision=PRECISION)
        store_tokens(z, found, b, first, r, kh, e, T, K, V)
        store_tokens(d_value, found * strength[:, None], b, first, r, kh, e, T, K, V)
        products += tl.sum(found * tokens_by_features(v, b, first, r, kh, e, T, K, V), 1)
        value = features_by_tokens(corrected, b, first, r, kh, e, T, K, V)
        pairs = tl.dot(found.to(value.dtype), value, pairs, input_precision=PRECISION)
    store_numbers(d_strength, products, b, first, r, kh, T, K)
    pairs = tl.where(seen & (r[:, None] > r[None, :]), -pairs, 0.0)
    store_tokens(d_a, pairs, b, first, r, kh, r, T, K, CHUNK)
    for g in range(G):
        pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        for vt in range(VT):
            e = vt * VB + tl.arange(0, VB)
            grad = tokens_by_features(d_out, b, first, r, kh * G + g, e, T, N, V)
            value = features_by_tokens(corrected, b, first, r, kh, e, T, K, V)
            pairs = tl.dot(grad, value, pairs, input_precision=PRECISION)
        store_tokens(d_p, tl.where(seen, pairs, 0.0), b, first, r, kh * G + g, r, T, N, CHUNK)


@triton.jit
def paired(pairs, readers, keys, logs, i, j, levels, PRECISION: tl.constexpr):
    """The sums over the keys that each token reads, and over the tokens that read it, decayed, with weights `pairs`.

    pairs: below the diagonal a row has the weights of the keys that its token reads, and above it of what reads it.
    """
    read, written = tl.zeros(logs.shape, tl.float32), tl.zeros(logs.shape, tl.float32)
    for level in range(levels):
        # At this level the tokens of second blocks read the tokens of first blocks.
        second = ((i >> level) & 1) == 1
        factor = tl.exp(summed_tokens(until_middle(i, j, level), logs, PRECISION))
        other = (tl.where(second, readers, keys) * factor).to(keys.dtype)
        met = tl.where(((i >> level) ^ (j >> level)) == 1, pairs, 0.0).to(keys.dtype)
        found = factor * tl.dot(met, other, input_precision=PRECISION)
        read += tl.where(second, found, 0.0)
        written += tl.where(second, 0.0, found)
    return read, written


def feature_delta_gradients(
    q, k, beta, log, segments, states, corrected, d_out, d_states, z, d_p, d_a, factors,
    d_query, d_key, d_strength, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_query (B, T, N, F), d_key and d_log (B, T, K, F): one program FB features of a chunk.

    d_strength (B, tiles of features, T, K) has its part of beta's gradient, without Z . V.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    FT: tl.constexpr = (F + FB - 1) // FB
    K: tl.constexpr = N // G
    c, kh, ft, b = tl.program_id(0), tl.program_id(1) // FT, tl.program_id(1) % FT, tl.program_id(2)
    first = c * CHUNK
    r, f = tl.arange(0, CHUNK), ft * FB + tl.arange(0, FB)
    i, j = r[:, None], r[None, :]
    at = ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
    strength = token_numbers(beta, b, first, r, kh, T, K)
    start = tl.exp(summed_tokens(j <= i, logs, PRECISION))
    end = tl.exp(summed_tokens(j > i, logs, PRECISION))
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
        start = tl.where(reads_state(segments, own, b, c, T, CHUNK, False)[:, None], start, 0.0)
        end = tl.where(reads_state(segments, own, b, c, T, CHUNK, True)[:, None], end, 0.0)
    # The keys that read the state, and those that are written to it.
    reader, written = tl.zeros([CHUNK, FB], tl.float32), tl.zeros([CHUNK, FB], tl.float32)
    total = tl.zeros([FB], tl.float32)
    for vt in range(VT):
        e = vt * VB + tl.arange(0, VB)
        place, there = e[:, None] + f[None, :] * V, (e < V)[:, None] & (f < F)[None, :]
        before = tl.load(states + at + place, mask=there, other=0.0)
        after = tl.load(d_states + at + place, mask=there, other=0.0)
        grad = tokens_by_features(z, b, first, r, kh, e, T, K, V)
        value = tokens_by_features(corrected, b, first, r, kh, e, T, K, V)
        reader = tl.dot(grad, before, reader, input_precision=PRECISION)
        written = tl.dot(value, after, written, input_precision=PRECISION)
        total += tl.sum(before.to(tl.float32) * after, 0)
    total *= chunk_factors(factors, b, c, kh, f, T, K, F, CHUNK)
    reader *= -start
    written *= end
    ends = written * key
    # The pairs of tokens.
    upper = features_by_tokens(d_a, b, first, r, kh, r, T, K, CHUNK) * strength[None, :]
    keyed = tokens_by_features(d_a, b, first, r, kh, r, T, K, CHUNK)
    keyed = tl.where(i > j, keyed, upper.to(keyed.dtype))
    found, own_pairs = paired(keyed, key, key, logs, i, j, count_levels(first, T, CHUNK), PRECISION)
    reader += found
    crossing = tl.zeros([CHUNK, FB], tl.float32)
    for g in range(G):
        h = kh * G + g
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        near = tl.zeros([CHUNK, FB], tl.float32)
        for vt in range(VT):
            e = vt * VB + tl.arange(0, VB)
            place, there = e[:, None] + f[None, :] * V, (e < V)[:, None] & (f < F)[None, :]
            before = tl.load(states + at + place, mask=there, other=0.0)
            grad = tokens_by_features(d_out, b, first, r, h, e, T, N, V)
            near = tl.dot(grad, before, near, input_precision=PRECISION)
        near *= start
        queried = tokens_by_features(d_p, b, first, r, h, r, T, N, CHUNK)
        diagonal = tl.sum(tl.where(i == j, queried.to(tl.float32), 0.0), 1)[:, None]
        queried = tl.where(i > j, queried, features_by_tokens(d_p, b, first, r, h, r, T, N, CHUNK))
        found, back = paired(queried, query, key, logs, i, j, count_levels(first, T, CHUNK), PRECISION)
        near += found
        own_pairs += back
        crossing += query * near
        store_tokens(d_query, near + diagonal * key, b, first, r, h, f, T, N, F)
        written += diagonal * query
    store_numbers(d_strength, tl.sum(reader * key, 1), b * FT + ft, first, r, kh, T, K)
    reader *= strength[:, None]
    crossing += (reader - own_pairs) * key
    store_tokens(d_key, reader + own_pairs + written, b, first, r, kh, f, T, K, F)
    gradient = tl.cumsum(crossing, 0, reverse=True) + (tl.cumsum(ends, 0) - ends) + total[None, :]
    follows = tokens_by_features(log, b, first, r, kh, f, T, K, F) > -200.0
    if SEGMENTS:
        follows = follows & (own >= 0)[:, None]
    store_tokens(d_log, tl.where(follows, gradient, 0.0), b, first, r, kh, f, T, K, F)
