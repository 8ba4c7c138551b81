"""The delta rule, forward: the inverses of all chunks, the states before them, and the outputs.

Within a chunk, with D the decay between two tokens, a from its beginning to a token and e from a token to its end::

    T = (I + strictly lower part of diag(beta) (K K^T * D))^-1
    R = T diag(beta) (V - a K S)
    S = total S + (e K)^T R
    out = a Q S + tril(Q K^T * D) R

(arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3). What does not need the state is computed for
all chunks at once: W = T diag(beta) a K and U = T diag(beta) V, so that R = U - W S.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.functions import (
    chunk_factor,
    chunk_factors,
    features_by_tokens,
    log_decays,
    logs_after,
    logs_between,
    segment_after,
    segment_before,
    segment_numbers,
    store_tokens,
    token_numbers,
    tokens_by_features,
)


@triton.jit
def start_factors(
    log, segments, b, c, rows, head, T: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """How much of the state before its chunk each token reads."""
    factor = tl.full([CHUNK], 1.0, tl.float32)
    if DECAY:
        factor = tl.exp(tl.cumsum(log_decays(log, b, c * CHUNK, rows, head, T, K), 0))
    if SEGMENTS:
        own = segment_numbers(segments, b, c * CHUNK, rows, T)
        factor = tl.where((own == segment_before(segments, b, c, T, CHUNK)) & (own >= 0), factor, 0.0)
    return factor


@triton.jit
def end_factors(
    log, segments, b, c, rows, head, T: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """How much of what each token writes is in the state after its chunk."""
    factor = tl.full([CHUNK], 1.0, tl.float32)
    if DECAY:
        factor = tl.exp(logs_after(log, b, c * CHUNK, rows, head, T, K, CHUNK))
    if SEGMENTS:
        own = segment_numbers(segments, b, c * CHUNK, rows, T)
        factor = tl.where((own == segment_after(segments, b, c, T, CHUNK)) & (own >= 0), factor, 0.0)
    return factor


@triton.jit
def pair_factors(
    log, segments, b, c, rows, head, T: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """How much the token of each row reads of what the token of each column wrote."""
    factor = tl.where(rows[:, None] >= rows[None, :], 1.0, 0.0)
    if DECAY:
        factor *= tl.exp(logs_between(log_decays(log, b, c * CHUNK, rows, head, T, K), rows, rows))
    if SEGMENTS:
        own = segment_numbers(segments, b, c * CHUNK, rows, T)
        factor = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], factor, 0.0)
    return factor


@triton.jit
def unit_triangular_inverse(triangle, rows, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + triangle)^-1 of a strictly lower or upper matrix, from the inverses of blocks of doubling size."""
    i, j = rows[:, None], rows[None, :]
    # Two tokens of a pair of blocks of one token each.
    found = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -triangle, 0.0))
    for level in tl.static_range(1, 8):
        if (2 << level) <= CHUNK:
            corner = tl.where(
                (i >> level != j >> level) & (i >> (level + 1) == j >> (level + 1)), triangle, 0.0
            )
            corner = tl.dot(corner, found, input_precision=PRECISION)
            found -= tl.dot(found, corner, input_precision=PRECISION)
    return found


def delta_chunks(
    k, v, beta, log, segments, inverse, w, u,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """inverse (B, T, K, CHUNK), row i of which belongs to token i; w (B, T, K, F) and u (B, T, K, V)."""
    c, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, r, f = c * CHUNK, tl.arange(0, CHUNK), tl.arange(0, FP)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    lower = tl.dot(key, tl.trans(key), input_precision=PRECISION) * strength[:, None]
    lower *= pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    lower = tl.where(r[:, None] > r[None, :], lower, 0.0)
    found = unit_triangular_inverse(lower, r, CHUNK, INVERSE_PRECISION).to(key.dtype)
    store_tokens(inverse, found, b, first, r, kh, r, T, K, CHUNK)
    reads = strength * start_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    reading = tl.dot(found, (key * reads[:, None]).to(key.dtype), input_precision=PRECISION)
    store_tokens(w, reading, b, first, r, kh, f, T, K, F)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        value = tokens_by_features(v, b, first, r, kh, e, T, K, V)
        value = (value * strength[:, None]).to(value.dtype)
        store_tokens(u, tl.dot(found, value, input_precision=PRECISION), b, first, r, kh, e, T, K, V)


@triton.jit
def state_after(
    state, value, k, w, log, segments, beta, factors, b, c, head, r, f,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr,
    BY_FEATURE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after a chunk; value is its tile of u.

    BY_FEATURE, k, w and u are what `delta_by_feature` writes, what reads the state, and the values.
    """
    reading = tokens_by_features(w, b, c * CHUNK, r, head, f, T, K, F)
    writing = features_by_tokens(k, b, c * CHUNK, r, head, f, T, K, F)
    corrected = value - tl.dot(reading, state.to(reading.dtype), input_precision=PRECISION)
    if BY_FEATURE:
        corrected *= token_numbers(beta, b, c * CHUNK, r, head, T, K)[:, None]
        state *= chunk_factors(factors, b, c, head, f, T, K, F, CHUNK)[:, None]
    elif DECAY or SEGMENTS:
        corrected *= end_factors(log, segments, b, c, r, head, T, K, CHUNK, DECAY, SEGMENTS)[:, None]
        state *= chunk_factor(log, segments, b, c, head, T, K, CHUNK, DECAY, SEGMENTS)
    return tl.dot(writing, corrected.to(writing.dtype), state, input_precision=PRECISION)


def delta_maps(
    k, w, u, log, segments, beta, factors, maps,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, DECAY: tl.constexpr, BY_FEATURE: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """maps (B, K, SPANS, F, F + V): a span of SPAN chunks turns the state S into A S + B, and the map is [A B].

    A is what becomes of the identity if nothing is written, and B of zeros.
    """
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    tile, kh, span, b = (
        tl.program_id(0),
        tl.program_id(1) // SPANS,
        tl.program_id(1) % SPANS,
        tl.program_id(2),
    )
    is_map = tile < (F + VB - 1) // VB
    first = tl.where(is_map, tile, tile - (F + VB - 1) // VB) * VB
    size = tl.where(is_map, F, V)
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), first + tl.arange(0, VB)
    state = tl.where(is_map, tl.where(f[:, None] == e[None, :], 1.0, 0.0), 0.0)
    for c in range(span * SPAN, tl.minimum((span + 1) * SPAN, CHUNKS)):
        value = tokens_by_features(u, b, c * CHUNK, r, kh, e, T, K, V)
        value = tl.where(is_map, 0.0, value)
        state = state_after(
            state, value, k, w, log, segments, beta, factors, b, c, kh, r, f, T, K, F, CHUNK, DECAY, BY_FEATURE,
            SEGMENTS, PRECISION,
        )  # fmt: skip
    out = maps + ((b.to(tl.int64) * K + kh) * SPANS + span) * (F * (F + V)) + tl.where(is_map, 0, F)
    tl.store(out + f[:, None] * (F + V) + e[None, :], state, mask=(f < F)[:, None] & (e < size)[None, :])


@triton.jit
def first_of_span(
    first_state, maps, row, span, f, e, F: tl.constexpr, V: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Columns of the state before a span, to which the maps of the earlier spans lead from the row's first."""
    there = (f < F)[:, None] & (e < V)[None, :]
    state = tl.load(first_state + row * (F * V) + f[:, None] * V + e[None, :], mask=there, other=0.0)
    if SPANS > 1:
        square = (f < F)[:, None] & (f < F)[None, :]
        for earlier in tl.range(0, span, num_stages=1):
            begin = maps + (row * SPANS + earlier) * (F * (F + V))
            change = tl.load(begin + f[:, None] * (F + V) + f[None, :], mask=square, other=0.0)
            added = tl.load(begin + F + f[:, None] * (F + V) + e[None, :], mask=there, other=0.0)
            state = tl.dot(change, state, added, input_precision=PRECISION)
    return state


def delta_states(
    k, w, u, log, segments, first_state, maps, states, last_state,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """states (B, K, chunks, F, V), those before each chunk, and the last: one program some columns of a span."""
    CHUNKS: tl.constexpr = (T + CHUNK - 1) // CHUNK
    kh, span, b = tl.program_id(1) // SPANS, tl.program_id(1) % SPANS, tl.program_id(2)
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), tl.program_id(0) * VB + tl.arange(0, VB)
    at, there = f[:, None] * V + e[None, :], (f < F)[:, None] & (e < V)[None, :]
    row = b.to(tl.int64) * K + kh
    state = first_of_span(first_state, maps, row, span, f, e, F, V, SPANS, PRECISION)
    for c in range(span * SPAN, tl.minimum((span + 1) * SPAN, CHUNKS)):
        tl.store(states + (row * CHUNKS + c) * (F * V) + at, state.to(states.dtype.element_ty), mask=there)
        value = tokens_by_features(u, b, c * CHUNK, r, kh, e, T, K, V)
        state = state_after(
            state, value, k, w, log, segments, log, log, b, c, kh, r, f, T, K, F, CHUNK, DECAY, False, SEGMENTS,
            PRECISION,
        )  # fmt: skip
    if span == SPANS - 1:
        tl.store(last_state + row * (F * V) + at, state, mask=there)


def delta_outputs(
    q, k, w, u, log, segments, states, out, corrected,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, T, N, V), and where KEEP corrected (B, T, K, V), R of the module's text."""
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    c, h, vt, b = tl.program_id(0), tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    first, kh = c * CHUNK, h // G
    r, f, e = tl.arange(0, CHUNK), tl.arange(0, FP), vt * VB + tl.arange(0, VB)
    before = states + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * (F * V)
    state = tl.load(before + f[:, None] * V + e[None, :], mask=(f < F)[:, None] & (e < V)[None, :], other=0.0)
    reading = tokens_by_features(w, b, first, r, kh, f, T, K, F)
    value = tokens_by_features(u, b, first, r, kh, e, T, K, V)
    value = (value - tl.dot(reading, state, input_precision=PRECISION)).to(reading.dtype)
    if KEEP:  # noqa: SIM102
        if h % G == 0:
            store_tokens(corrected, value, b, first, r, kh, e, T, K, V)
    query = tokens_by_features(q, b, first, r, h, f, T, N, F)
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    p = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    p *= pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
    acc = tl.dot(query, state, input_precision=PRECISION)
    if DECAY or SEGMENTS:
        acc *= start_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
    store_tokens(out, acc, b, first, r, h, e, T, N, V)
