"""The structured-matrix mechanisms.

Score matrices are dense (n, n) sums, and bilinear forms are dense (d, d) matrices assembled from the weights entry by
entry. If layer norms come between the factors, features are computed channel block by channel block."""

from __future__ import annotations

import itertools
import math

import numpy as np

from tests.oracles.attention import softmax_attention, softmax_attention_gradients
from tests.oracles.parts import (
    each_head,
    inputs,
    layer_norm,
    merge,
    norm,
    project,
    residual_network,
    rotary,
    softmax,
    turned,
    visible,
)


def same_block(length, size):
    if isinstance(size, np.ndarray):  # each token's block
        return (size[:, None, :, None] == size[:, None, None]) * 1.0
    i = np.arange(length)
    return np.ones((length, length)) if size is None else (i[:, None] // size == i[None] // size) * 1.0


def mlr_attention(arrays, ranks, sizes, visible):
    """The output and the gradients of query, key and value from dense scores, added as a bias to scores of zero."""
    query, key, value, d_out = (np.asarray(x, np.float64) for x in arrays)
    length, heads, group = query.shape[1], query.shape[2], query.shape[2] // key.shape[2]
    wide = np.repeat(key, group, 2)
    masks = [same_block(length, size) for size in sizes]
    starts = np.cumsum((0, *ranks))
    slices = [slice(a, b) for a, b in itertools.pairwise(starts)]
    weights = [mask / rank for mask, rank in zip(masks, ranks)]
    scores = sum(
        w * np.einsum("btnh,bsnh->bnts", query[..., s], wide[..., s]) for w, s in zip(weights, slices)
    )
    zero = np.zeros_like(query)
    out, _ = softmax_attention(zero, key, value, visible, bias=scores)
    _, _, d_value, d_scores = softmax_attention_gradients(zero, key, value, visible, d_out, bias=scores)
    d_query, d_wide = np.zeros_like(query), np.zeros_like(query)
    for w, s in zip(weights, slices):
        d_query[..., s] = np.einsum("bnts,bsnh->btnh", w * d_scores, wide[..., s])
        d_wide[..., s] = np.einsum("bnts,btnh->bsnh", w * d_scores, query[..., s])
    d_key = d_wide.reshape(*key.shape[:2], heads // group, group, -1).sum(3)
    return out, d_query, d_key, d_value


def normed_heads(u, p, m, d):
    """Queries, keys and values (n, heads, h), with rotary positions."""
    q, k, v = inputs(u, p, rotated=False)
    if m.qk_norm:
        q, k = norm(q, p["query_norm"], d.norm), norm(k, p["key_norm"], d.norm)
    return rotary(q, np.arange(len(u))), rotary(k, np.arange(len(u))), v


@each_head
def mlr(q, k, v, *, ranks, block_sizes, scales=None, is_causal=False):
    """score(i, j) is the sum of q_i^(l) . k_j^(l) / r_l over the levels l whose block contains both i and j
    (arXiv:2509.07963, equation 9)."""
    n, scores, first = len(q), 0, 0
    for level, (rank, size) in enumerate(zip(ranks, block_sizes)):
        own = slice(first, first + rank)
        scale = 1 / rank if scales is None else scales[level]
        scores = scores + same_block(n, size) * (q[:, own] @ k[:, own].T) * scale
        first += rank
    return softmax(scores, visible(n, is_causal)) @ v


def mlr_mix(u, p, m, d):
    sizes = m.block_sizes
    if sizes is None:
        sizes = [None] + [m.context // 2**level for level in range(1, len(m.ranks))]
    options = {"ranks": m.ranks, "block_sizes": sizes, "scales": [score_scale(m, rank) for rank in m.ranks]}
    return merge(mlr(*normed_heads(u, p, m, d), is_causal=d.is_causal, **options), p)


def limited(weight, fan_in, fan_out, m):
    """Divided by max(1, RMS / RMS_0)."""
    if not m.limit_weights:
        return weight
    rms = np.sqrt((weight * weight).mean())
    limit = math.sqrt(min(fan_in, fan_out) / fan_in**2)
    return weight / (rms / limit) if np.real(rms) > limit else weight


def score_scale(m, features):
    return 1 / math.sqrt(features) if m.score_scale is None else m.score_scale / features


@each_head
def of_features(q, k, v, is_causal, positions):
    """Attention by products of features (n, f), rotated if there are positions; an odd last feature never is."""
    even = q.shape[1] // 2 * 2
    if positions is not None:
        q, k = (np.concatenate([turned(x[:, :even], positions), x[:, even:]], 1) for x in (q, k))
    return softmax(q @ k.T, visible(len(q), is_causal)) @ v


def bilinear_mlr(
    x,
    value,
    *,
    query_weights,
    key_weights,
    norms=None,
    scales=None,
    normalize=True,
    is_causal=False,
    positions=None,
):
    """The sum over the levels of LN(W_q x_i) . LN(W_k x_j) / sqrt(r_l p_l), with block-diagonal W (eq. 6).

    norms are pairs of scales, each level's."""
    sides = [], []
    for level, weights in enumerate(zip(query_weights, key_weights)):
        for side, weight, norm_scale in zip(sides, weights, (1.0, 1.0) if norms is None else norms[level]):
            blocks, size, heads, rank = weight.shape
            features = np.einsum("npd,pdar->napr", x.reshape(len(x), blocks, size), weight)
            features = features.reshape(len(x), heads, blocks * rank)
            if normalize:
                features = layer_norm(features, {"scale": norm_scale})
            if side is sides[0]:
                features = features * (1 / math.sqrt(blocks * rank) if scales is None else scales[level])
            side.append(features)
    return of_features(
        *(np.concatenate(side, 2) for side in sides), value, is_causal=is_causal, positions=positions
    )


def bilinear_mlr_mix(u, p, m, d):
    ranks = (1, 1, 1, 1) if m.ranks is None else m.ranks
    every = [(p[f"query_{level}"], p[f"key_{level}"]) for level in range(len(ranks))]
    every = [[limited(w, w.shape[1], w.shape[2] * w.shape[3], m) for w in pair] for pair in every]
    query, key = zip(*every)
    norms = None
    if m.normalize:
        norms = [(p[f"query_norm_{level}"], p[f"key_norm_{level}"]) for level in range(len(ranks))]
    out = bilinear_mlr(
        u, project(u, p["value"]), query_weights=query, key_weights=key, norms=norms, normalize=m.normalize,
        scales=[score_scale(m, w.shape[0] * w.shape[3]) for w in query], is_causal=d.is_causal,
        positions=np.arange(len(u)),
    )  # fmt: skip
    return merge(out, p)


def btt_dense(right, left):
    """The (d, d) matrix of one head, right (c, e, b, t) and left (b, a, c, t), entry by entry."""
    (c_size, e_size, b_size, t_size), a_size = right.shape, left.shape[1]
    dense = np.zeros((a_size * b_size, c_size * e_size), np.result_type(right, left))
    for a, b, c, e in np.ndindex(a_size, b_size, c_size, e_size):
        dense[a * b_size + b, c * e_size + e] = sum(
            left[b, a, c, t] * right[c, e, b, t] for t in range(t_size)
        )
    return dense


def bilinear_btt(
    x, value, *, right, left, norm_scale=1.0, scale=None, normalize=True, is_causal=False, positions=None
):
    """x_i . LN(M x_j) / sqrt(D) with a block tensor-train M of each head (equations 5, 7 and 40)."""
    keys = np.stack([x @ btt_dense(right[:, :, a], left[a]).T for a in range(len(left))], 1)
    keys = layer_norm(keys, {"scale": norm_scale}) if normalize else keys
    query = x[:, None] * (1 / math.sqrt(x.shape[1]) if scale is None else scale)
    return of_features(query, keys, value, is_causal=is_causal, positions=positions)


def bilinear_btt_mix(u, p, m, d):
    (c, e, heads, b, t), a = p["right"].shape, p["left"].shape[2]
    out = bilinear_btt(
        u, project(u, p["value"]),
        right=limited(p["right"], e, heads * b * t, m), left=limited(p["left"], c * t, a, m),
        norm_scale=p["key_norm"] if m.normalize else None, normalize=m.normalize,
        scale=score_scale(m, u.shape[1]), is_causal=d.is_causal, positions=np.arange(len(u)),
    )  # fmt: skip
    return merge(out, p)


@each_head
def global_window(q, k, v, *, ranks, window, scales=None, is_causal=False):
    """Attention by the first features to all tokens, plus by the others to a window (section 5.1)."""
    n, (first, second) = len(q), ranks
    scales = (8 / first, 8 / second) if scales is None else scales
    every = visible(n, is_causal)
    distance = np.arange(n)[:, None] - np.arange(n)
    near = every & (abs(distance) <= (window - 1 if is_causal else window // 2))
    parts = (slice(0, first), slice(first, None))
    return sum(
        softmax(scale * q[:, own] @ k[:, own].T, mask) @ v
        for own, scale, mask in zip(parts, scales, (every, near))
    )


def global_window_mix(u, p, m, d):
    options = {"ranks": m.ranks, "window": m.window, "scales": [score_scale(m, rank) for rank in m.ranks]}
    return merge(global_window(*normed_heads(u, p, m, d), is_causal=d.is_causal, **options), p)


NETWORKS = {
    "mlr": residual_network(mlr_mix),
    "bilinear_mlr": residual_network(bilinear_mlr_mix),
    "bilinear_btt": residual_network(bilinear_btt_mix),
    "global_window": residual_network(global_window_mix),
}
