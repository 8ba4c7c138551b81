"""The delta rule, forward: the state decays by one factor for each token, or BY_FEATURE by one for each of its rows.

In a chunk, the state decays by a from the beginning to a token, by e from a token to the end, and by D between two
tokens. A is the strictly lower part of the products of keys with keys, weighted by D, its rows times beta. P is the
lower part of the same products of queries with keys. With T = (I + A)^-1::

    X   = beta (V - (a K) S)
    R   = T X
    out = (a Q) S + P R
    S   = factor S + (e K)^T R

(arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3; by feature arXiv:2510.26692). One kernel
computes T^T and P^T for all chunks at once, and a, e and the chunks' factors with zeros where segments differ.
BY_FEATURE it computes a Q, a K, (P T)^T and T^T (e K) instead. The kernels that walk the chunks then need neither
decays nor segments, and BY_FEATURE no T, only X.

By feature, a chunk is halved again and again, as a block is in `by_feature`. At a level a token either reads or is
read, so it has one factor there. Every exponent is a sum of logarithms between two tokens, hence at most 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.by_feature import count_levels, reads_state
from pallas_kernels.triton.recurrent.functions import (
    chunk_factor,
    chunk_factors,
    features_by_tokens,
    finite_logs,
    log_decays,
    log_halves,
    logs_after,
    operand,
    segment_after,
    segment_before,
    segment_numbers,
    store_tokens,
    summed_features,
    summed_halves,
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
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How much the token of each column reads of what the token of each row wrote."""
    upper = rows[:, None] <= rows[None, :]
    factor = tl.where(upper, 1.0, 0.0)
    if DECAY:
        logs = log_decays(log, b, c * CHUNK, rows, head, T, K)
        later = tl.where(rows[None, :] > rows[:, None], logs[None, :], 0.0)
        factor *= tl.exp(summed_features(later, upper, PRECISION))
    if SEGMENTS:
        own = segment_numbers(segments, b, c * CHUNK, rows, T)
        factor = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], factor, 0.0)
    return factor


@triton.jit
def bounded(x, PRECISION: tl.constexpr):
    """Numbers for a product. float16 has TF32's digits; numbers beyond its range come from a state that grows beyond it
    within a chunk."""
    if PRECISION == "ieee":
        return x
    else:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def unit_upper_inverse(triangle, rows, levels, PRECISION: tl.constexpr):
    """(I + triangle)^-1 of a strictly upper matrix of 2^levels tokens, from the inverses of blocks of doubling size."""
    i, j = rows[:, None], rows[None, :]
    # Two tokens of a pair of blocks of one token each.
    found = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -triangle, 0.0))
    triangle = bounded(triangle, PRECISION)
    for level in range(1, levels):
        met = ((i >> level) ^ (j >> level)) == 1
        blocks = bounded(found, PRECISION)
        corner = tl.dot(tl.where(met, triangle, 0.0).to(triangle.dtype), blocks, input_precision=PRECISION)
        found -= tl.dot(blocks, bounded(corner, PRECISION), input_precision=PRECISION)
    return found


@triton.jit
def factors_of(sums, which, high, low, rows, PRECISION: tl.constexpr):
    """The decays of tokens over others, by a matrix of `sums`, which says whose logarithms are summed for each row.

    sums: float16 (levels + 2, tokens, tokens). At a level, tokens decay to the middle of a pair of blocks; see
    `by_feature`. The last two are for the chunk's end and from its beginning.
    """
    size: tl.constexpr = rows.shape[0]
    which = tl.load(sums + (which * size + rows[:, None]) * size + rows[None, :])
    return tl.exp(summed_halves(which, high, low, PRECISION))


@triton.jit
def one_of(which, x, y, factor):
    """x or y, times a factor. A sum takes fewer registers than a choice, which Triton makes for single numbers."""
    return x * tl.where(which, factor, 0.0).to(x.dtype) + y * tl.where(which, 0.0, factor).to(x.dtype)


def delta_chunks(
    q, k, beta, log, segments, sums, weights, inverse, queries, reads, writes, starts, ends, factors,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, STAGES: tl.constexpr, DECAY: tl.constexpr, BY_FEATURE: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weights P^T (B, T, N, CHUNK) and inverse T^T (B, T, K, CHUNK).

    With DECAY or SEGMENTS also starts a, ends e (B, K, T) and factors (B, K, chunks). BY_FEATURE weights (P T)^T,
    queries a Q (B, T, N, F), reads a K and writes T^T (e K) (B, T, K, F), and factors (B, K, chunks, F).
    """
    K: tl.constexpr = N // G
    FT: tl.constexpr = (F + FB - 1) // FB
    c, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, kh = c * CHUNK, h // G
    r = tl.arange(0, CHUNK)
    i, j = r[:, None], r[None, :]
    levels = count_levels(first, T, CHUNK)
    # Products of keys, in the rows, with queries and with keys; BY_FEATURE with D.
    p, overlap = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for ft in tl.range(FT, num_stages=1):
        f = ft * FB + tl.arange(0, FB)
        key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
        query = tokens_by_features(q, b, first, r, h, f, T, N, F)
        if BY_FEATURE:
            logs = finite_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
            high, low = log_halves(logs, PRECISION)
            overlap += tl.where(i == j, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
            for level in tl.range(levels, num_stages=STAGES):
                factor = factors_of(sums, level, high, low, r, PRECISION)
                # Above the diagonal are products of keys with keys, and below it of queries with keys.
                rows = one_of(((i >> level) & 1) == 1, query, key, factor)
                column = tl.trans(key * factor.to(key.dtype))
                found = tl.dot(rows, column, input_precision=PRECISION)
                overlap += tl.where(((i >> level) ^ (j >> level)) == 1, found, 0.0)
        else:
            p = tl.dot(key, tl.trans(query), p, input_precision=PRECISION)
            overlap = tl.dot(key, tl.trans(key), overlap, input_precision=PRECISION)
    if BY_FEATURE:
        # Memory transposes it, because a transposed product must not be multiplied again (see `delta_backward`).
        store_tokens(weights, overlap, b, first, r, h, r, T, N, CHUNK)
        tl.debug_barrier()
        p = features_by_tokens(weights, b, first, r, h, r, T, N, CHUNK).to(tl.float32)
    factor = pair_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS, PRECISION)
    p = operand(p * factor, q.dtype.element_ty, PRECISION)
    strength = token_numbers(beta, b, first, r, kh, T, K)
    upper = tl.where(i < j, overlap * factor * strength[None, :], 0.0)
    found = operand(unit_upper_inverse(upper, r, levels, PRECISION), p.dtype, PRECISION)
    if h % G == 0:
        store_tokens(inverse, found, b, first, r, kh, r, T, K, CHUNK)
    if not BY_FEATURE:
        store_tokens(weights, p, b, first, r, h, r, T, N, CHUNK)
        if DECAY or SEGMENTS:  # noqa: SIM102
            if h % G == 0:
                row = b.to(tl.int64) * K + kh
                start = start_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
                tl.store(starts + row * T + first + r, start, mask=first + r < T)
                end = end_factors(log, segments, b, c, r, kh, T, K, CHUNK, DECAY, SEGMENTS)
                tl.store(ends + row * T + first + r, end, mask=first + r < T)
                kept = chunk_factor(log, segments, b, c, kh, T, K, CHUNK, DECAY, SEGMENTS)
                tl.store(factors + row * tl.num_programs(0) + c, kept)
    else:
        p = operand(tl.dot(found, p, input_precision=PRECISION), p.dtype, PRECISION)
        store_tokens(weights, p, b, first, r, h, r, T, N, CHUNK)
        kept = chunk_factor(log, segments, b, c, kh, T, K, CHUNK, False, SEGMENTS)
        if SEGMENTS:
            own = segment_numbers(segments, b, first, r, T)
        for ft in tl.range(FT, num_stages=1):
            f = ft * FB + tl.arange(0, FB)
            logs = finite_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
            high, low = log_halves(logs, PRECISION)
            start = factors_of(sums, LEVELS + 1, high, low, r, PRECISION)
            if SEGMENTS:
                start = tl.where(reads_state(segments, own, b, c, T, CHUNK, False)[:, None], start, 0.0)
            query = tokens_by_features(q, b, first, r, h, f, T, N, F)
            store_tokens(queries, operand(query * start, query.dtype, PRECISION), b, first, r, h, f, T, N, F)
            if h % G == 0:
                key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
                store_tokens(reads, operand(key * start, key.dtype, PRECISION), b, first, r, kh, f, T, K, F)
                end = factors_of(sums, LEVELS, high, low, r, PRECISION)
                if SEGMENTS:
                    end = tl.where(reads_state(segments, own, b, c, T, CHUNK, True)[:, None], end, 0.0)
                written = tl.dot(found, operand(key * end, key.dtype, PRECISION), input_precision=PRECISION)
                store_tokens(writes, operand(written, key.dtype, PRECISION), b, first, r, kh, f, T, K, F)
                at = factors + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * F
                tl.store(at + f, tl.exp(tl.sum(logs, 0)) * kept, mask=f < F)


@triton.jit
def token_factors(
    factors, b, c, rows, head, T: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, SCALED: tl.constexpr
):
    """A chunk's numbers of an array (B, K, T), and ones unless SCALED."""
    if SCALED:
        at = factors + (b.to(tl.int64) * K + head) * T + c * CHUNK
        return tl.load(at + rows, mask=c * CHUNK + rows < T, other=0.0)
    else:
        return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit
def state_factor(
    factors, b, c, head, f, T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr,
    BY_FEATURE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What a chunk leaves of the state before it, or of the gradient of the state after it."""
    if BY_FEATURE:
        return chunk_factors(factors, b, c, head, f, T, K, F, CHUNK)[:, None]
    elif SCALED:
        return tl.load(factors + (b.to(tl.int64) * K + head) * ((T + CHUNK - 1) // CHUNK) + c)
    else:
        return 1.0


@triton.jit
def across_chunk(
    state, value, start, reads, writes, inverse, beta, ends, factors, b, c, head, r, f,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BY_FEATURE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R of a chunk (BY_FEATURE X), and the state after it."""
    factor = state_factor(factors, b, c, head, f, T, K, F, CHUNK, BY_FEATURE, SCALED)
    reading = tokens_by_features(reads, b, c * CHUNK, r, head, f, T, K, F)
    read = tl.dot(reading, operand(state, reading.dtype, PRECISION), input_precision=PRECISION)
    new = (value - read * start[:, None]) * token_numbers(beta, b, c * CHUNK, r, head, T, K)[:, None]
    new = operand(new, reading.dtype, PRECISION)
    if BY_FEATURE:
        writing, written = features_by_tokens(writes, b, c * CHUNK, r, head, f, T, K, F), new
    else:
        solve = features_by_tokens(inverse, b, c * CHUNK, r, head, r, T, K, CHUNK)
        new = operand(tl.dot(solve, new, input_precision=PRECISION), reading.dtype, PRECISION)
        end = token_factors(ends, b, c, r, head, T, K, CHUNK, SCALED)
        writing, written = tl.trans(reading), operand(new * end[:, None], reading.dtype, PRECISION)
    return new, tl.dot(writing, written, state * factor, input_precision=PRECISION)


def delta_maps(
    reads, writes, inverse, v, beta, starts, ends, factors, maps,
    T: tl.constexpr, K: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BY_FEATURE: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
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
        value = tokens_by_features(v, b, c * CHUNK, r, kh, e, T, K, V)
        value = tl.where(is_map, 0.0, value)
        start = token_factors(starts, b, c, r, kh, T, K, CHUNK, SCALED)
        _, state = across_chunk(
            state, value, start, reads, writes, inverse, beta, ends, factors, b, c, kh, r, f, T, K, F, CHUNK,
            BY_FEATURE, SCALED, PRECISION,
        )  # fmt: skip
    out = maps + ((b.to(tl.int64) * K + kh) * SPANS + span) * (F * (F + V)) + tl.where(is_map, 0, F)
    tl.store(out + f[:, None] * (F + V) + e[None, :], state, mask=(f < F)[:, None] & (e < size)[None, :])


@triton.jit
def first_of_span(
    first_state, maps, row, span, f, e, F: tl.constexpr, V: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Columns of the state before a span: the row's first state, through the maps of the earlier spans."""
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


def delta_outputs(
    queries, weights, reads, writes, inverse, v, beta, starts, ends, factors, first_state, maps,
    out, last_state, states, corrected,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, BY_FEATURE: tl.constexpr,
    SCALED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
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
        before = operand(state, v.dtype.element_ty, PRECISION)
        value = tokens_by_features(v, b, first, r, kh, e, T, K, V)
        start = token_factors(starts, b, c, r, kh, T, K, CHUNK, SCALED)
        new, state = across_chunk(
            state, value, start, reads, writes, inverse, beta, ends, factors, b, c, kh, r, f, T, K, F, CHUNK,
            BY_FEATURE, SCALED, PRECISION,
        )  # fmt: skip
        for g in range(G):
            query = tokens_by_features(queries, b, first, r, kh * G + g, f, T, N, F)
            weight = features_by_tokens(weights, b, first, r, kh * G + g, r, T, N, CHUNK)
            total = tl.dot(query, before, input_precision=PRECISION) * start[:, None]
            total = tl.dot(weight, new, total, input_precision=PRECISION)
            store_tokens(out, total, b, first, r, kh * G + g, e, T, N, V)
        if KEEP:
            tl.store(states + (row * CHUNKS + c) * (F * V) + at, before, mask=there)
            if BY_FEATURE:
                solve = features_by_tokens(inverse, b, first, r, kh, r, T, K, CHUNK)
                new = operand(tl.dot(solve, new, input_precision=PRECISION), v.dtype.element_ty, PRECISION)
            store_tokens(corrected, new, b, first, r, kh, e, T, K, V)
    if span == SPANS - 1:
        tl.store(last_state + row * (F * V) + at, state, mask=there)
