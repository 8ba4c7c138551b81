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
    log_halves,
    place,
    segment_after,
    segment_before,
    segment_numbers,
    store_tokens,
    summed_halves,
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
def reads(token, level, LATER: tl.constexpr):
    """Whether a token reads at a level, where it is in the later (LATER: earlier) block of a pair; else it is read."""
    return ((token >> level) & 1) == (0 if LATER else 1)


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
def other_block(first, T: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr):
    """Where the chunk's block before (LATER: after) the one at token `first` begins, -1 where there is none."""
    if LATER:
        return tl.where((first // BN % (CHUNK // BN) == 0) & (CHUNK > BN) & (first + BN < T), first + BN, -1)
    else:
        return tl.where(first % CHUNK > 0, first - BN, -1)


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
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, T, N, V), the sums over z of the weights x y^T: one program a block of tokens.

    Forward, x, y and z are queries, keys and values. Backward they are keys, queries and the outputs' gradients, and
    the sum over a group of heads is the gradient of the values.
    """
    VT: tl.constexpr = (V + VB - 1) // VB
    K: tl.constexpr = N // G
    X: tl.constexpr = K if LATER else N
    Y: tl.constexpr = N if LATER else K
    PART: tl.constexpr = min(FB, 64)
    ALIGNED: tl.constexpr = 16 if F % 8 == 0 else 1
    head, vt, b = tl.program_id(1) // VT, tl.program_id(1) % VT, tl.program_id(2)
    kh = head // G
    xh, yh = (kh, head) if LATER else (head, kh)
    first = tl.program_id(0) * BN
    c = first // CHUNK
    beside = other_block(first, T, CHUNK, BN, LATER)
    r, e = tl.arange(0, BN), vt * VB + tl.arange(0, VB)
    i, j = r[:, None], r[None, :]
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
    p, far = tl.zeros([BN, BN], tl.float32), tl.zeros([BN, BN], tl.float32)
    for ft in range((F + FB - 1) // FB):
        f = ft * FB + tl.arange(0, FB)
        tokens = tokens_by_features(x, b, first, r, xh, f, T, X, F)
        column = tokens_by_features(y, b, first, r, yh, f, T, Y, F)
        p += tl.where(i == j, tl.dot(tokens, tl.trans(column), input_precision=PRECISION), 0.0)
        logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
        high, low = log_halves(logs, PRECISION)
        readers = x + place(b, first, xh, T, X, F) + i * (X * F)
        read = y + place(b, first, yh, T, Y, F) + i * (Y * F)
        there = (first + i < T) & (f < F)[None, :]
        for level in range(count_levels(first, T, BN)):
            factor = tl.exp(summed_halves(until_middle(i, j, level), high, low, PRECISION))
            rows = tl.multiple_of(tl.where(reads(i, level, LATER), readers, read), [ALIGNED, 1])
            both = tl.load(rows + f[None, :], mask=there, other=0.0)
            both = (both * factor).to(tokens.dtype)
            weights = tl.dot(both, tl.trans(both), input_precision=PRECISION)
            p += tl.where(meet(i, j, level, LATER), weights, 0.0)
    if SEGMENTS:
        p = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], p, 0.0)
    p = p.to(z.dtype.element_ty)
    if beside >= 0:
        for ft in range((F + PART - 1) // PART):
            f = ft * PART + tl.arange(0, PART)
            logs = feature_logs(tokens_by_features(log, b, beside, r, kh, f, T, K, F))
            reach = tl.exp(summed_tokens(j <= i if LATER else j > i, logs, PRECISION))
            column = tokens_by_features(y, b, beside, r, yh, f, T, Y, F)
            column = (column * reach).to(column.dtype)
            logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
            start = tl.exp(summed_tokens(j > i if LATER else j <= i, logs, PRECISION))
            tokens = tokens_by_features(x, b, first, r, xh, f, T, X, F)
            tokens = (tokens * start).to(tokens.dtype)
            far = tl.dot(tokens, tl.trans(column), far, input_precision=PRECISION)
        if SEGMENTS:
            others = segment_numbers(segments, b, beside, r, T)
            far = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], far, 0.0)
    acc = tl.dot(p, tokens_by_features(z, b, first, r, yh, e, T, Y, V), input_precision=PRECISION)
    if beside >= 0:
        value = tokens_by_features(z, b, beside, r, yh, e, T, Y, V)
        acc = tl.dot(far.to(value.dtype), value, acc, input_precision=PRECISION)
    if not LATER or head % G == 0:  # the gradient of the state is that of all heads of a group
        at = states + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + c) * (F * V)
        for ft in range((F + PART - 1) // PART):
            f = ft * PART + tl.arange(0, PART)
            logs = feature_logs(tokens_by_features(log, b, first, r, kh, f, T, K, F))
            start = summed_tokens(j > i if LATER else j <= i, logs, PRECISION)
            if beside >= 0:
                logs = feature_logs(tokens_by_features(log, b, beside, r, kh, f, T, K, F))
                start += tl.sum(logs, 0)[None, :]
            tokens = tokens_by_features(x, b, first, r, xh, f, T, X, F)
            tokens = (tokens * tl.exp(start)).to(tokens.dtype)
            if SEGMENTS:
                tokens = tl.where(reads_state(segments, own, b, c, T, CHUNK, LATER)[:, None], tokens, 0.0)
            there = (f < F)[:, None] & (e < V)[None, :]
            state = tl.load(at + f[:, None] * V + e[None, :], mask=there, other=0.0)
            acc = tl.dot(tokens, state, acc, input_precision=PRECISION)
    store_tokens(out, acc, b, first, r, head, e, T, N, V)


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
        columns = tokens_by_features(w, b, begin, r, other, e, T, OTHERS, V)
        found = tl.dot(rows, tl.trans(columns), found, input_precision=PRECISION)
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
