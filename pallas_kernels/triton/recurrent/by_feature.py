"""Sums of outer products whose state has one decay for each feature of the keys (GLA, arXiv:2312.06635).

A chunk is cut into blocks. Between two blocks, the later block's tokens decay from its beginning and the earlier
block's until its end, so a product of matrices has the scores of all pairs. A block is halved in the same way, level by
level, down to single tokens, and each level's product has the scores of the pairs that meet there. Every exponent is a
sum of logarithms between two tokens, hence at most 0. A product with a matrix of zeros and ones forms these sums;
differences of running sums would lose a weak decay behind a strong one.

Forward, a token reads earlier tokens and the state before its chunk. Backward (LATER) the same kernels run towards the
past: a token reads later tokens and the gradient of the state after its chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.functions import (
    feature_logs,
    features_by_tokens,
    segment_after,
    segment_before,
    segment_numbers,
    store_tokens,
    summed_features,
    summed_tokens,
    tokens_by_features,
)


@triton.jit
def until_middle(token, other, level):
    """Whether a token's decay at a level includes that of another token.

    At this level, blocks of 2^level tokens form pairs. A token of the second block decays from the block's beginning,
    and one of the first block until its end.
    """
    second = ((token >> level) & 1) == 1
    return ((token >> level) == (other >> level)) & tl.where(second, other <= token, other > token)


@triton.jit
def meet(token, other, level, LATER: tl.constexpr):
    """Whether a token and another, which is earlier (LATER: later), are in the two blocks of a pair."""
    after = other > token if LATER else token > other
    return (((token >> level) ^ (other >> level)) == 1) & after


@triton.jit
def count_levels(first, T: tl.constexpr, BN: tl.constexpr):
    """How many levels a block has, which are fewer where the row ends in it."""
    return tl.sum(((1 << tl.arange(0, 8)) < tl.minimum(BN, T - first)).to(tl.int32), 0)


@triton.jit
def other_blocks(first, T: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr):
    """How many blocks of a chunk come before (LATER: after) the block that begins at token `first`."""
    begin = first // CHUNK * CHUNK
    if LATER:
        return (tl.minimum(begin + CHUNK, T) - first - 1) // BN
    else:
        return (first - begin) // BN


@triton.jit
def reads_state(segments, own, b, chunk, T: tl.constexpr, CHUNK: tl.constexpr, LATER: tl.constexpr):
    """Whether tokens of these segments read the state."""
    if LATER:
        return (own == segment_after(segments, b, chunk, T, CHUNK)) & (own >= 0)
    else:
        return (own == segment_before(segments, b, chunk, T, CHUNK)) & (own >= 0)


def feature_scan(
    sums, factors, first_state, before, states, last_state, totals,
    K: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The states before all chunks and after the last, from what the chunks add; one program FB features.

    Backward, the gradients of the states after all chunks and of the first state, and with `before`, the states before
    the chunks, also the gradients of the chunks' decays: totals (B, K, CHUNKS, F).
    """
    kh, b = tl.program_id(1), tl.program_id(2)
    f, e = tl.program_id(0) * FB + tl.arange(0, FB), tl.arange(0, VP)
    at, there = f[:, None] * V + e[None, :], (f < F)[:, None] & (e < V)[None, :]
    row = b.to(tl.int64) * K + kh
    state = tl.load(first_state + row * (F * V) + at, mask=there, other=0.0)
    for step in tl.range(0, CHUNKS, num_stages=STAGES):
        c = row * CHUNKS + (CHUNKS - 1 - step if BACKWARD else step)
        added = tl.load(sums + c * (F * V) + at, mask=there, other=0.0)
        factor = tl.load(factors + c * F + f, mask=f < F, other=0.0)
        tl.store(states + c * (F * V) + at, state.to(states.dtype.element_ty), mask=there)
        if BACKWARD:
            earlier = tl.load(before + c * (F * V) + at, mask=there, other=0.0).to(tl.float32)
            tl.store(totals + c * F + f, tl.sum(state * earlier, 1) * factor, mask=f < F)
        state = state * factor[:, None] + added
    tl.store(last_state + row * (F * V) + at, state, mask=there)


def feature_outputs(
    x, y, z, log, segments, states, out,
    T: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, T, HEADS, V), the sums over z of the weights x y^T: one program a block of tokens.

    Forward, x, y and z are queries, keys and values. Backward they are keys, queries and the outputs' gradients, and
    the sum over a group of heads is the gradient of the values.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = HEADS if LATER else HEADS // G
    OTHERS: tl.constexpr = HEADS * G if LATER else HEADS // G
    head, vt, b = tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    kh = head if LATER else head // G
    first = tl.program_id(0) * BN
    c = first // CHUNK
    r, e = tl.arange(0, BN), vt * VB + tl.arange(0, VB)
    i, j = r[:, None], r[None, :]
    at = states + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + c) * (F * V)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
    acc = tl.zeros([BN, VB], tl.float32)
    for ft in range((F + FB - 1) // FB):
        f = ft * FB + tl.arange(0, FB)
        tokens = tokens_by_features(x, b, first, r, head, f, T, HEADS, F)
        logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
        transposed = feature_logs(features_by_tokens(log, b, first, r, kh, f, T, K, F))
        for g in range(G if LATER else 1):
            other = kh * G + g if LATER else kh
            column = features_by_tokens(y, b, first, r, other, f, T, OTHERS, F)
            p = tl.where(i == j, tl.dot(tokens, column, input_precision=PRECISION), 0.0)
            for level in range(count_levels(first, T, BN)):
                near = tokens * tl.exp(summed_tokens(until_middle(i, j, level), logs, PRECISION))
                there = column * tl.exp(summed_features(transposed, until_middle(j, i, level), PRECISION))
                weights = tl.dot(near.to(tokens.dtype), there.to(column.dtype), input_precision=PRECISION)
                p = tl.where(meet(i, j, level, LATER), weights, p)
            if SEGMENTS:
                p = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], p, 0.0)
            value = tokens_by_features(z, b, first, r, other, e, T, OTHERS, V)
            acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        start = tl.exp(summed_tokens(j > i if LATER else j <= i, logs, PRECISION))
        far = (tokens * start).to(tokens.dtype)
        gap = tl.zeros([FB], tl.float32)
        for g in range(G if LATER else 1):
            other = kh * G + g if LATER else kh
            gap = tl.zeros([FB], tl.float32)
            for m in range(other_blocks(first, T, CHUNK, BN, LATER)):
                begin = first + (m + 1) * BN if LATER else first - (m + 1) * BN
                column = features_by_tokens(y, b, begin, r, other, f, T, OTHERS, F)
                between = feature_logs(features_by_tokens(log, b, begin, r, kh, f, T, K, F))
                reach = summed_features(between, i <= j if LATER else i > j, PRECISION) + gap[:, None]
                p = tl.dot(far, (column * tl.exp(reach)).to(column.dtype), input_precision=PRECISION)
                if SEGMENTS:
                    others = segment_numbers(segments, b, begin, r, T)
                    p = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], p, 0.0)
                value = tokens_by_features(z, b, begin, r, other, e, T, OTHERS, V)
                acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
                gap += tl.sum(between, 1)
        if SEGMENTS:
            far = tl.where(reads_state(segments, own, b, c, T, CHUNK, LATER)[:, None], far, 0.0)
        there = (f < F)[:, None] & (e < V)[None, :]
        state = tl.load(at + f[:, None] * V + e[None, :], mask=there, other=0.0)
        far = (far * tl.exp(gap)[None, :]).to(tokens.dtype)
        acc = tl.dot(far, state, acc, input_precision=PRECISION)
    store_tokens(out, acc, b, first, r, head, e, T, HEADS, V)


@triton.jit
def pair_gradients(
    u, w, segments, b, first, begin, r, head, other,
    T: tl.constexpr, HEADS: tl.constexpr, OTHERS: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    BN: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights between two blocks of tokens: u w^T within segments."""
    found = tl.zeros([BN, BN], tl.float32)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        rows = tokens_by_features(u, b, first, r, head, e, T, HEADS, V)
        columns = features_by_tokens(w, b, begin, r, other, e, T, OTHERS, V)
        found = tl.dot(rows, columns, found, input_precision=PRECISION)
    if SEGMENTS:
        own, others = segment_numbers(segments, b, first, r, T), segment_numbers(segments, b, begin, r, T)
        found = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], found, 0.0)
    return found


def feature_gradients(
    x, y, u, w, log, segments, states, d_x, flow, ends,
    T: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_x (B, T, HEADS, F) and what flows to or from each feature; one program FB features of a block of tokens.

    For queries, x, y, u and w are queries, keys, the outputs' gradients and values. For keys (LATER) they are keys,
    queries, values and the outputs' gradients. flow is between a token and those that it reads; what flows from keys to
    the state is in `ends`.
    """
    K: tl.constexpr = HEADS if LATER else HEADS // G
    OTHERS: tl.constexpr = HEADS * G if LATER else HEADS // G
    FT: tl.constexpr = (F + FB - 1) // FB
    head, b = tl.program_id(1) // FT, tl.program_id(2)
    kh = head if LATER else head // G
    first = tl.program_id(0) * BN
    c = first // CHUNK
    r, f = tl.arange(0, BN), tl.program_id(1) % FT * FB + tl.arange(0, FB)
    i, j = r[:, None], r[None, :]
    logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
    near = tl.zeros([BN, FB], tl.float32)
    for g in range(G if LATER else 1):
        other = kh * G + g if LATER else kh
        dp = pair_gradients(
            u, w, segments, b, first, first, r, head, other, T, HEADS, OTHERS, V, VB, BN, SEGMENTS, PRECISION
        )
        row = tokens_by_features(y, b, first, r, other, f, T, OTHERS, F)
        near += tl.sum(tl.where(i == j, dp, 0.0), 1)[:, None] * row
        for level in range(count_levels(first, T, BN)):
            factor = tl.exp(summed_tokens(until_middle(i, j, level), logs, PRECISION))
            pairs = tl.where(meet(i, j, level, LATER), dp, 0.0).to(row.dtype)
            near += factor * tl.dot(pairs, (row * factor).to(row.dtype), input_precision=PRECISION)
    far = tl.zeros([BN, FB], tl.float32)
    gap = tl.zeros([FB], tl.float32)
    for g in range(G if LATER else 1):
        other = kh * G + g if LATER else kh
        gap = tl.zeros([FB], tl.float32)
        for m in range(other_blocks(first, T, CHUNK, BN, LATER)):
            begin = first + (m + 1) * BN if LATER else first - (m + 1) * BN
            dp = pair_gradients(
                u, w, segments, b, first, begin, r, head, other, T, HEADS, OTHERS, V, VB, BN, SEGMENTS, PRECISION,
            )  # fmt: skip
            between = feature_logs(tokens_by_features(log, b, begin, r, kh, f, T, K, F))
            reach = summed_tokens(j <= i if LATER else j > i, between, PRECISION) + gap[None, :]
            row = tokens_by_features(y, b, begin, r, other, f, T, OTHERS, F)
            row = (row * tl.exp(reach)).to(row.dtype)
            far = tl.dot(dp.to(row.dtype), row, far, input_precision=PRECISION)
            gap += tl.sum(between, 0)
    start = tl.exp(summed_tokens(j > i if LATER else j <= i, logs, PRECISION))
    near += start * far
    at = states + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + c) * (F * V)
    read = tl.zeros([BN, FB], tl.float32)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        grad = tokens_by_features(u, b, first, r, head, e, T, HEADS, V)
        state = tl.load(at + e[:, None] + f[None, :] * V, mask=(e < V)[:, None] & (f < F)[None, :], other=0.0)
        read = tl.dot(grad, state, read, input_precision=PRECISION)
    read *= start * tl.exp(gap)[None, :]
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
        read = tl.where(reads_state(segments, own, b, c, T, CHUNK, LATER)[:, None], read, 0.0)
    tokens = tokens_by_features(x, b, first, r, head, f, T, HEADS, F)
    if LATER:
        store_tokens(ends, read * tokens, b, first, r, head, f, T, HEADS, F)
        store_tokens(flow, near * tokens, b, first, r, head, f, T, HEADS, F)
    else:
        store_tokens(flow, (near + read) * tokens, b, first, r, head, f, T, HEADS, F)
    store_tokens(d_x, near + read, b, first, r, head, f, T, HEADS, F)


def feature_decay_gradient(
    log, segments, query_flow, key_flow, ends, totals, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """d_log (B, T, K, F), 0 for padding: one program FB features of a chunk; see `backward`."""
    FT: tl.constexpr = (F + FB - 1) // FB
    K: tl.constexpr = N // G
    c, kh, b = tl.program_id(0), tl.program_id(1) // FT, tl.program_id(2)
    first, r, f = c * CHUNK, tl.arange(0, CHUNK), tl.program_id(1) % FT * FB + tl.arange(0, FB)
    crossing = -tokens_by_features(key_flow, b, first, r, kh, f, T, K, F)
    for g in range(G):
        crossing += tokens_by_features(query_flow, b, first, r, kh * G + g, f, T, N, F)
    end = tokens_by_features(ends, b, first, r, kh, f, T, K, F)
    at = totals + ((b.to(tl.int64) * K + kh) * tl.num_programs(0) + c) * F
    total = tl.load(at + f, mask=f < F, other=0.0)
    gradient = tl.cumsum(crossing, 0, reverse=True) + (tl.cumsum(end, 0) - end) + total[None, :]
    follows = tokens_by_features(log, b, first, r, kh, f, T, K, F) > -200.0
    if SEGMENTS:
        follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)[:, None]
    store_tokens(d_log, tl.where(follows, gradient, 0.0), b, first, r, kh, f, T, K, F)
