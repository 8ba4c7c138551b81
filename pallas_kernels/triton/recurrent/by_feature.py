"""Sums of outer products whose state has one decay for each feature of the keys (GLA, arXiv:2312.06635).

A chunk has one block or two. Between two blocks, the later block's tokens decay from its beginning and the earlier
block's until its end, so a product of matrices has the scores of all pairs. A block is halved in the same way, level by
level, down to single tokens, and each level's product has the scores of the pairs that meet there. At a level a token
either reads or is read, so one matrix has the queries of the one kind and the keys of the other, all decayed, and its
product with itself has the scores. Every exponent is a sum of logarithms between two tokens, hence at most 0. A product
with a matrix of zeros and ones forms these sums; differences of running sums would lose a weak decay behind a strong
one. A product of 64 rows takes 4 warps: with 8, two of them would compute each part.

Forward, a token reads earlier tokens and the state before its chunk. Backward (LATER), for the gradient of the values,
the same kernels run towards the past: a token reads later tokens and the gradient of the state after its chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton.recurrent.functions import (
    finite_logs,
    place,
    segment_after,
    segment_before,
    segment_numbers,
    store_tokens,
    summed_tokens,
    tokens_by_features,
)


@triton.jit
def until_middle(token, other, level):
    """Whether a token's decay at a level includes that of another token.

    At this level, blocks of 2^level tokens form pairs. A token of the second block decays from the block's beginning,
    and one of the first block until its end.
    """
    begin = token >> level << level
    second = ((token >> level) & 1) == 1
    least = tl.where(second, begin, token + 1)
    count = tl.where(second, token + 1, begin + (1 << level)) - least
    return (other - least).to(tl.uint32) < count.to(tl.uint32)


@triton.jit
def base2_logs(log, b, first, r, head, f, T: tl.constexpr, K: tl.constexpr, F: tl.constexpr):
    """The logarithms of a tile, finite, times log2(e): exp2 takes fewer instructions than exp."""
    return finite_logs(tokens_by_features(log, b, first, r, head, f, T, K, F)) * 1.4426950408889634


@triton.jit
def summed(which, like, logs, PRECISION: tl.constexpr):
    """Sums the logarithms (tokens, features) of the tokens that each row of `which` has.

    They are rounded to float16 (for float32 they are not), so a decay by exp(-s) is wrong by at most 2^-12 s exp(-s).
    `like` is the result of a product, and comparing it with itself, true in any case, lets the next product take
    `which` from the same registers.
    """
    which = which & ((like == like) | (like != like))
    if PRECISION == "ieee":
        return tl.dot(which.to(tl.float32), logs, input_precision=PRECISION)
    else:
        return tl.dot(which.to(tl.float16), logs.to(tl.float16))


@triton.jit
def reads(token, level, LATER: tl.constexpr):
    """Whether a token reads at a level, where it is in the later (LATER: earlier) block of a pair; else it is read."""
    return ((token >> level) & 1) == (0 if LATER else 1)


@triton.jit
def meet(token, other, level, here):
    """Whether a token and another are in the two blocks of a pair, where `here` is true for the token."""
    begin = tl.where(here, (token >> level ^ 1) << level, 1 << 20)
    return (other - begin).to(tl.uint32) < (begin * 0 + (1 << level)).to(tl.uint32)


@triton.jit
def count_levels(first, T: tl.constexpr, BN: tl.constexpr):
    """How many levels a block has, which are fewer where the row ends in it."""
    return tl.sum(((1 << tl.arange(0, 8)) < tl.minimum(BN, T - first)).to(tl.int32), 0)


@triton.jit
def other_block(first, T: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, LATER: tl.constexpr):
    """Where the chunk's block before (LATER: after) the one at token `first` begins, -1 at the chunk's edge."""
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
        logs = base2_logs(log, b, first, r, kh, f, T, K, F)
        readers = x + place(b, first, xh, T, X, F) + i * (X * F)
        read = y + place(b, first, yh, T, Y, F) + i * (Y * F)
        there = (first + i < T) & (f < F)[None, :]
        for level in range(count_levels(first, T, BN)):
            factor = tl.exp2(summed(until_middle(i, j, level), p, logs, PRECISION))
            rows = tl.multiple_of(tl.where(reads(i, level, LATER), readers, read), [ALIGNED, 1])
            both = tl.load(rows + f[None, :], mask=there, other=0.0)
            both = (both * factor).to(tokens.dtype)
            weights = tl.dot(both, tl.trans(both), input_precision=PRECISION)
            p += tl.where(meet(i, j, level, reads(i, level, LATER)), weights, 0.0)
    if SEGMENTS:
        p = tl.where((own[:, None] == own[None, :]) & (own >= 0)[None, :], p, 0.0)
    p = p.to(z.dtype.element_ty)
    if beside >= 0:
        for ft in range((F + PART - 1) // PART):
            f = ft * PART + tl.arange(0, PART)
            logs = base2_logs(log, b, beside, r, kh, f, T, K, F)
            reach = tl.exp2(summed(j <= i if LATER else j > i, p, logs, PRECISION))
            column = tokens_by_features(y, b, beside, r, yh, f, T, Y, F)
            column = (column * reach).to(column.dtype)
            logs = base2_logs(log, b, first, r, kh, f, T, K, F)
            start = tl.exp2(summed(j > i if LATER else j <= i, p, logs, PRECISION))
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
    if not LATER or head % G == 0:  # all heads of a group share the gradient of the state
        at = states + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + c) * (F * V)
        for ft in range((F + PART - 1) // PART):
            f = ft * PART + tl.arange(0, PART)
            logs = base2_logs(log, b, first, r, kh, f, T, K, F)
            start = summed(j > i if LATER else j <= i, p, logs, PRECISION)
            if beside >= 0:
                logs = base2_logs(log, b, beside, r, kh, f, T, K, F)
                start += tl.sum(logs, 0)[None, :]
            tokens = tokens_by_features(x, b, first, r, xh, f, T, X, F)
            tokens = (tokens * tl.exp2(start)).to(tokens.dtype)
            if SEGMENTS:
                tokens = tl.where(reads_state(segments, own, b, c, T, CHUNK, LATER)[:, None], tokens, 0.0)
            there = (f < F)[:, None] & (e < V)[None, :]
            state = tl.load(at + f[:, None] * V + e[None, :], mask=there, other=0.0)
            acc = tl.dot(tokens, state, acc, input_precision=PRECISION)
    store_tokens(out, acc, b, first, r, head, e, T, N, V)


@triton.jit
def pair_gradients(
    u, w, segments, b, first, begin, r, uh, wh,
    T: tl.constexpr, U: tl.constexpr, W: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights between two blocks of tokens: u w^T within segments."""
    found = tl.zeros([r.shape[0], r.shape[0]], tl.float32)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        rows = tokens_by_features(u, b, first, r, uh, e, T, U, V)
        columns = tokens_by_features(w, b, begin, r, wh, e, T, W, V)
        found = tl.dot(rows, tl.trans(columns), found, input_precision=PRECISION)
    if SEGMENTS:
        own, others = segment_numbers(segments, b, first, r, T), segment_numbers(segments, b, begin, r, T)
        found = tl.where((own[:, None] == others[None, :]) & (others >= 0)[None, :], found, 0.0)
    return found


@triton.jit
def state_gradients(
    u, states, segments, b, chunk, first, r, uh, kh, f, T: tl.constexpr, U: tl.constexpr, K: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, CHUNK: tl.constexpr, LATER: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u times a chunk's state (LATER: its gradient), for the tokens that read (LATER: write) it."""
    at = states + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + chunk) * (F * V)
    found = tl.zeros([r.shape[0], f.shape[0]], tl.float32)
    for vt in range((V + VB - 1) // VB):
        e = vt * VB + tl.arange(0, VB)
        rows = tokens_by_features(u, b, first, r, uh, e, T, U, V)
        state = tl.load(at + f[:, None] * V + e[None, :], mask=(f < F)[:, None] & (e < V)[None, :], other=0.0)
        found = tl.dot(rows, tl.trans(state), found, input_precision=PRECISION)
    if SEGMENTS:
        own = segment_numbers(segments, b, first, r, T)
        found = tl.where(reads_state(segments, own, b, chunk, T, CHUNK, LATER)[:, None], found, 0.0)
    return found


@triton.jit
def outer_gradients(
    y, u, w, log, segments, states, other_states, b, first, r, yh, uh, kh, f, reads, writes,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, F: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    CHUNK: tl.constexpr, LATER: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a block's queries (LATER: keys) from beyond it, and what flows from end to end of the block.

    reads, writes: whether the gradients from the state, and what flows between it and the other block, count here.
    """
    BN: tl.constexpr = r.shape[0]
    Y: tl.constexpr = N if LATER else K
    U: tl.constexpr = K if LATER else N
    i, j = r[:, None], r[None, :]
    chunk = first // CHUNK
    beside = other_block(first, T, CHUNK, BN, LATER)
    found = state_gradients(
        u, states, segments, b, chunk, first, r, uh, kh, f, T, U, K, F, V, VB, CHUNK, LATER, SEGMENTS, PRECISION,
    )  # fmt: skip
    found = tl.where(reads, found, 0.0)
    flow = tl.zeros([f.shape[0]], tl.float32)
    if beside >= 0:
        logs = base2_logs(log, b, beside, r, kh, f, T, K, F)
        found *= tl.exp2(tl.sum(logs, 0))[None, :]
        row = tokens_by_features(y, b, beside, r, yh, f, T, Y, F)
        row = row * tl.exp2(summed_tokens(j <= i if LATER else j > i, logs, PRECISION))
        crossing = state_gradients(
            w, other_states, segments, b, chunk, beside, r, yh, kh, f,
            T, Y, K, F, V, VB, CHUNK, not LATER, SEGMENTS, PRECISION,
        )  # fmt: skip
        flow = tl.where(writes, tl.sum(row * crossing, 0), 0.0)
        pairs = pair_gradients(
            u, w, segments, b, first, beside, r, uh, yh, T, U, Y, V, VB, SEGMENTS, PRECISION
        )
        row = row.to(y.dtype.element_ty)
        found = tl.dot(pairs.to(row.dtype), row, found, input_precision=PRECISION)
    logs = base2_logs(log, b, first, r, kh, f, T, K, F)
    found *= tl.exp2(summed_tokens(j > i if LATER else j <= i, logs, PRECISION))
    return found, flow * tl.exp2(tl.sum(logs, 0))


def feature_gradients(
    q, k, v, grad, log, segments, states, d_states, totals, d_query, d_key, d_log,
    T: tl.constexpr, N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients (B, T, N, F) of queries, keys and logarithms; one program FB features of a block of tokens.

    A token's logarithm is in the decays between all that comes before it and all that follows. Within the block, what
    flows across it is the sum over it and the later tokens of query d_query - key d_key, and all flows from keys to
    what follows the block. In a group of heads, the first has what flows from keys to the state.
    """
    K: tl.constexpr = N // G
    FT: tl.constexpr = (F + FB - 1) // FB
    PART: tl.constexpr = min(FB, 32)
    ALIGNED: tl.constexpr = 16 if F % 8 == 0 else 1
    head, b = tl.program_id(1) // FT, tl.program_id(2)
    kh = head // G
    first = tl.program_id(0) * BN
    r, f0 = tl.arange(0, BN), tl.program_id(1) % FT * FB
    f = f0 + tl.arange(0, FB)
    i, j = r[:, None], r[None, :]
    first_head = head % G == 0
    kept = d_log + place(b, first, head, T, N, F)
    for part in range(FB // PART):
        g = f0 + part * PART + tl.arange(0, PART)
        d_q, flow = outer_gradients(
            k, grad, v, log, segments, states, d_states, b, first, r, kh, head, kh, g, True, first_head,
            T, N, K, F, V, VB, CHUNK, False, SEGMENTS, PRECISION,
        )  # fmt: skip
        store_tokens(d_query, d_q, b, first, r, head, g, T, N, F)
        d_k, more = outer_gradients(
            q, v, grad, log, segments, d_states, states, b, first, r, head, kh, kh, g, first_head, True,
            T, N, K, F, V, VB, CHUNK, True, SEGMENTS, PRECISION,
        )  # fmt: skip
        store_tokens(d_key, d_k, b, first, r, head, g, T, N, F)
        at = totals + ((b.to(tl.int64) * K + kh) * ((T + CHUNK - 1) // CHUNK) + first // CHUNK) * F
        flow += more + tl.where(first_head, tl.load(at + g, mask=g < F, other=0.0), 0.0)
        flow += tl.sum(tokens_by_features(k, b, first, r, kh, g, T, K, F) * d_k, 0)
        tl.store(kept + g, flow, mask=g < F)
    pairs = pair_gradients(
        grad, v, segments, b, first, first, r, head, kh, T, N, K, V, VB, SEGMENTS, PRECISION
    )
    mirrored = pair_gradients(
        v, grad, segments, b, first, first, r, kh, head, T, K, N, V, VB, SEGMENTS, PRECISION
    )
    pairs = tl.where(i >= j, pairs, mirrored).to(q.dtype.element_ty)
    logs = base2_logs(log, b, first, r, kh, f, T, K, F)
    d_q, d_k = tl.zeros([BN, FB], tl.float32), tl.zeros([BN, FB], tl.float32)
    queries = q + place(b, first, head, T, N, F) + i * (N * F)
    keys = k + place(b, first, kh, T, K, F) + i * (K * F)
    there = (first + i < T) & (f < F)[None, :]
    for level in range(count_levels(first, T, BN)):
        factor = tl.exp2(summed(until_middle(i, j, level), pairs, logs, PRECISION))
        second = reads(i, level, False)
        rows = tl.multiple_of(tl.where(second, queries, keys), [ALIGNED, 1])
        both = tl.load(rows + f[None, :], mask=there, other=0.0)
        both = (both * factor).to(pairs.dtype)
        met = tl.where(meet(i, j, level, i >= 0), pairs, 0.0)
        found = tl.dot(met, both, input_precision=PRECISION) * factor
        d_q += tl.where(second, found, 0.0)
        d_k += tl.where(second, 0.0, found)
    tl.debug_barrier()
    same = tl.sum(tl.where(i == j, pairs, 0.0), 1)[:, None]
    key = tokens_by_features(k, b, first, r, kh, f, T, K, F)
    d_q += tokens_by_features(d_query, b, first, r, head, f, T, N, F) + same * key
    store_tokens(d_query, d_q, b, first, r, head, f, T, N, F)
    query = tokens_by_features(q, b, first, r, head, f, T, N, F)
    d_k += tokens_by_features(d_key, b, first, r, head, f, T, N, F) + same * query
    store_tokens(d_key, d_k, b, first, r, head, f, T, N, F)
    gradient = tl.cumsum(query * d_q - key * d_k, 0, reverse=True)
    gradient += tl.load(kept + f, mask=f < F, other=0.0)[None, :]
    tl.debug_barrier()
    follows = tokens_by_features(log, b, first, r, kh, f, T, K, F) > -200.0
    if SEGMENTS:
        follows = follows & (segment_numbers(segments, b, first, r, T) >= 0)[:, None]
    store_tokens(d_log, tl.where(follows, gradient, 0.0), b, first, r, head, f, T, N, F)
