"""Networks of the structured-matrix mechanisms.

Score matrices are dense (n, n) sums, and bilinear forms are dense (d, d) matrices assembled from the weights entry by
entry. If layer norms come between the factors, features are computed channel block by channel block."""

from __future__ import annotations

import itertools
import math

import numpy as np

from tests.oracles.attention import softmax_attention, softmax_attention_gradients
from tests.oracles.parts import full_mask, layer_norm, merge, norm, project, residual_network, rotary, softmax


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
    q, k, v = (project(u, p[name]) for name in ("query", "key", "value"))
    if m.qk_norm:
        q, k = norm(q, p["query_norm"], d.norm), norm(k, p["key_norm"], d.norm)
    return rotary(q, np.arange(len(u))), rotary(k, np.arange(len(u))), v


def mlr_mix(u, p, m, d):
    n = len(u)
    places = np.arange(n)
    q, k, v = normed_heads(u, p, m, d)
    sizes = m.block_sizes
    if sizes is None:
        sizes = [None] + [m.context // 2**level for level in range(1, len(m.ranks))]
    heads = []
    for a in range(d.num_heads):
        b = a * d.num_kv_heads // d.num_heads
        scores, first = np.zeros((n, n)), 0
        for rank, size in zip(m.ranks, sizes):
            own = slice(first, first + rank)
            same = np.ones((n, n)) if size is None else places[:, None] // size == places // size
            scores = scores + same * (q[:, a, own] @ k[:, b, own].T) * score_scale(m, rank)
            first += rank
        heads.append(softmax(scores, full_mask(n, d, m)) @ v[:, b])
    return merge(heads, p)


def limited(weight, fan_in, fan_out, m):
    """Divided by max(1, RMS / RMS_0)."""
    if not m.limit_weights:
        return weight
    rms = np.sqrt((weight * weight).mean())
    limit = math.sqrt(min(fan_in, fan_out) / fan_in**2)
    return weight / (rms / limit) if np.real(rms) > limit else weight


def turned(features, places):
    """Rotary positions on (n, f); an odd last feature stays unrotated."""
    even = features.shape[1] // 2 * 2
    head = rotary(features[:, None, :even], places)[:, 0]
    return np.concatenate([head, features[:, even:]], 1)


def bilinear_mix(features):
    """features(u, p, m, d, head) -> query (n, f) and key (n, f) of a head."""

    def mix(u, p, m, d):
        n = len(u)
        v = project(u, p["value"])
        heads = []
        for a in range(d.num_heads):
            q, k = (turned(side, np.arange(n)) for side in features(u, p, m, d, a))
            heads.append(softmax(q @ k.T, full_mask(n, d, m)) @ v[:, a * d.num_kv_heads // d.num_heads])
        return merge(heads, p)

    return mix


def score_scale(m, features):
    return 1 / math.sqrt(features) if m.score_scale is None else m.score_scale / features


def bilinear_mlr_features(u, p, m, d, head):
    ranks = (1, 1, 1, 1) if m.ranks is None else m.ranks
    sides = []
    for side, number in (("query", head), ("key", head * d.num_kv_heads // d.num_heads)):
        columns = []
        for level, rank in enumerate(ranks):
            weight = p[f"{side}_{level}"]
            blocks, size, heads, _ = weight.shape
            weight = limited(weight, size, heads * rank, m)[:, :, number]
            level_features = np.concatenate(
                [u[:, b * size : (b + 1) * size] @ weight[b] for b in range(blocks)], 1
            )
            if m.normalize:
                level_features = layer_norm(level_features, {"scale": p[f"{side}_norm_{level}"]})
            if side == "query":
                level_features = level_features * score_scale(m, blocks * rank)
            columns.append(level_features)
        sides.append(np.concatenate(columns, 1))
    return sides


def btt_dense(right, left):
    """The (d, d) matrix of one head, right (c, e, b, t) and left (b, a, c, t), entry by entry."""
    (c_size, e_size, b_size, t_size), a_size = right.shape, left.shape[1]
    dense = np.zeros((a_size * b_size, c_size * e_size), np.result_type(right, left))
    for a, b, c, e in np.ndindex(a_size, b_size, c_size, e_size):
        dense[a * b_size + b, c * e_size + e] = sum(
            left[b, a, c, t] * right[c, e, b, t] for t in range(t_size)
        )
    return dense


def bilinear_btt_features(u, p, m, d, head):
    right, left = p["right"], p["left"]
    (c, e, heads, b, t), a = right.shape, left.shape[2]
    right = limited(right, e, heads * b * t, m)[:, :, head]
    left = limited(left, c * t, a, m)[head]
    keys = u @ btt_dense(right, left).T
    if m.normalize:
        keys = layer_norm(keys, {"scale": p["key_norm"]})
    return u * score_scale(m, u.shape[1]), keys


def global_window_mix(u, p, m, d):
    n = len(u)
    places = np.arange(n)
    q, k, v = normed_heads(u, p, m, d)
    distance = places[:, None] - places
    near = (distance < m.window) & (distance >= 0)
    if not d.is_causal:
        near = abs(distance) <= m.window // 2
    first = m.ranks[0]
    heads = []
    for a in range(d.num_heads):
        b = a * d.num_kv_heads // d.num_heads
        weights = 0
        for own, mask in ((slice(0, first), full_mask(n, d, m)), (slice(first, None), near)):
            scores, rank = q[:, a, own] @ k[:, b, own].T, q[:, a, own].shape[1]
            weights = weights + softmax(scores * score_scale(m, rank), mask)
        heads.append(weights @ v[:, b])
    return merge(heads, p)


NETWORKS = {
    "mlr": residual_network(mlr_mix),
    "bilinear_mlr": residual_network(bilinear_mix(bilinear_mlr_features)),
    "bilinear_btt": residual_network(bilinear_mix(bilinear_btt_features)),
    "global_window": residual_network(global_window_mix),
}
